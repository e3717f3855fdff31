"""`torchscript:FILE`: a program of `torch.jit`, traced or scripted, with branches and loops.

Loading one runs no Python and no pickles, but it is a program: its own language writes and reads files (`torch.save`,
`torch.from_file`) and calls other machines (RPC), even while it is loaded (`__setstate__`). Programs with these
operators need `--allow-code`; the other ones only compute tensors.
"""

from __future__ import annotations

import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch

from graphkiln_backend.graph.arrays import read_npz
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import CODE_HINT, EXPORT_BATCH, InputSpec, synthetic_samples
from graphkiln_converters.sources.pytorch import FixedBatchModel, TorchModel, with_free_batch

# Operators of torch 2.13 that access more than tensors.
_REACHES_OUT = re.compile(rb"\b(save|from_file|rpc_sync|rpc_async|rpc_remote)\b")
_MOST_CODE = 64 << 20
# Batch sizes to try; a program that accepts both accepts any.
_ANY_BATCH = (2, 3)
_USUAL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, *range(3, 32))
_HINT = "to have it batched, trace it without sizes in numbers: x.reshape(x.shape[0], -1), not x.reshape(1, -1)"


@dataclass(frozen=True, kw_only=True)
class ScriptModel(TorchModel):
    """A torch.jit program."""

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; branches and loops become nodes of the graph.

        Uses the older exporter of PyTorch, since torch.export does not support such programs.
        """
        example = synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0)
        axes = {
            spec.name: {0: "batch", **{axis + 1: f"{spec.name}_{axis + 1}" for axis in spec.dynamic}}
            for spec in self.inputs
        }
        outputs = list(self.run(example))
        return _export(self, example, outputs, {**axes, **{name: {0: "batch"} for name in outputs}})

    def export_fixed(self) -> onnx_ir.Model:
        """Export the graph with fixed input sizes."""
        samples = synthetic_samples(self.inputs, 1, {}, seed=0)
        example = {name: np.asarray(array[0]) for name, array in samples.items()}
        return _export(self, example, list(self.run(example)), {})


class _Holder(torch.nn.Module):
    """A wrapper with fewer arguments than its program; `forward` is defined later."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def open_source(location: str, recipe: Recipe) -> ScriptModel | FixedBatchModel:
    """Load a program. A traced batch size becomes variable if the program is shown to accept others.

    Raises:
        ConversionError: The file is missing or is no such program, it accesses more than tensors without
            --allow-code, or the sizes of its inputs are unknown.
    """
    check_file(location)
    reaching = _reaching_out(location)
    if reaching and not recipe.allow_code:
        raise ConversionError(
            f"{location} is not loaded: its program accesses files or other machines ({', '.join(reaching)})",
            hint=CODE_HINT,
        )
    load: Callable[..., Any] = torch.jit.load  # without type hints
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            module = load(location, map_location="cpu").eval().float()
    except Exception as error:
        raise _foreign(location, error) from error
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    inputs = _inputs(module, location, recipe)
    module = _with_defaults(module, inputs)
    model = ScriptModel(module=module, description=f"torchscript:{location}", libraries=("torch",), inputs=inputs)
    if all(_takes(model, size) for size in _ANY_BATCH):
        return model
    size = next((size for size in _USUAL_BATCHES if _takes(model, size)), 0)
    if not size:
        return model  # the proof reports the error
    whole = replace(model, inputs=tuple(replace(spec, shape=(size, *spec.shape)) for spec in inputs))
    return with_free_batch(whole, whole.export_fixed, recipe, _HINT)


def _takes(model: ScriptModel, size: int) -> bool:
    """Return true if a program returns as many rows as it is given."""
    try:
        outputs = model.run(synthetic_samples(model.inputs, size, {}, seed=0))
    except ConversionError:
        return False
    return all(array.shape[:1] == (size,) for array in outputs.values())


def _reaching_out(location: str) -> list[str]:
    """Find operators of a program that access more than tensors."""
    try:
        with open_regular(location) as file, zipfile.ZipFile(file) as archive:
            sources = [member for member in archive.infolist() if member.filename.endswith(".py")]
            code = b"\n".join(archive.read(member) for member in sources if member.file_size < _MOST_CODE)
            large = [member.filename for member in sources if member.file_size >= _MOST_CODE]
    except Exception as error:
        raise _foreign(location, error) from error
    return sorted({*large, *(name.decode() for name in _REACHES_OUT.findall(code))})


def _foreign(location: str, error: Exception) -> ConversionError:
    return ConversionError(
        f"{location} is not a program of torch.jit: {first_line(error)}",
        hint="save one with torch.jit.trace(...).save(FILE) or torch.jit.script(...).save(FILE); a file of weights "
        "needs an architecture: torchvision:NAME --weights FILE",
    )


def _inputs(module: Any, location: str, recipe: Recipe) -> tuple[InputSpec, ...]:
    """Inputs named by the program, with the given sizes or those of the samples."""
    arguments = [argument for argument in module.forward.schema.arguments[1:] if not argument.has_default_value()]
    others = [f"{argument.name} ({argument.type})" for argument in arguments if str(argument.type) != "Tensor"]
    if others:
        raise ConversionError(f"{location} has inputs that are not tensors: {', '.join(others)}")
    names = [argument.name for argument in arguments]
    samples: Mapping[str, AnyArray] = {}
    if recipe.samples and not recipe.samples.is_dir():
        with suppress(ManifestError):  # raised again where the samples are read
            samples = read_npz(recipe.samples)
    specs = [_spec(name, number, recipe, samples) for number, name in enumerate(names)]
    unknown = [name for name, spec in zip(names, specs, strict=True) if spec is None]
    if unknown:
        raise ConversionError(
            f"the sizes of {location}'s inputs are not known: {', '.join(unknown)}",
            hint=f"give the sizes of one sample: --shape {unknown[0]}=3x224x224; or, for integers, --samples FILE.npz",
        )
    return tuple(spec for spec in specs if spec)


def _with_defaults(module: Any, inputs: tuple[InputSpec, ...]) -> Any:
    """Wrap a program so that it takes tensors only, and other arguments keep their defaults."""
    if len(module.forward.schema.arguments) - 1 == len(inputs):
        return module
    outer = torch.jit.script(_Holder(module))
    names = ", ".join(f"input_{number}" for number in range(len(inputs)))
    outer.define(f"def forward(self, {names}):\n    return self.model({names})\n")
    return outer.eval()


def _spec(name: str, number: int, recipe: Recipe, samples: Mapping[str, AnyArray]) -> InputSpec | None:
    found = samples.get(name, samples.get(f"INPUT_{number}"))
    if found is not None and found.ndim:
        dtype = DType.FP32 if found.dtype.kind == "f" else DType.from_numpy(found.dtype)  # the program is in fp32
        if dtype is DType.BYTES:
            raise ConversionError(
                f"the samples contain text for '{name}', and torch.jit programs take numbers",
                hint="provide the integers of the tokenizer",
            )
        high = 2 if dtype.is_float or not found.size else max(2, int(found.max()) + 1)
        return InputSpec(name=name, dtype=dtype, shape=found.shape[1:], high=high)
    shape = recipe.shapes.get(name, recipe.shapes.get(""))
    return None if shape is None else InputSpec(name=name, shape=shape)


def _export(
    model: ScriptModel,
    example: Mapping[str, AnyArray],
    outputs: list[str],
    axes: Mapping[str, Mapping[int, str]],
) -> onnx_ir.Model:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="graphkiln-") as folder:
        warnings.simplefilter("ignore")  # PyTorch recommends the newer exporter, which does not support such programs
        target = Path(folder) / "model.onnx"
        try:
            torch.onnx.export(
                model.module,
                tuple(map(torch.from_numpy, example.values())),
                target,
                dynamo=False,
                dynamic_axes=axes,
                input_names=[spec.name for spec in model.inputs],
                output_names=outputs,
                opset_version=OPSET,
            )
        except Exception as error:
            raise ConversionError(
                f"PyTorch cannot export {model.description}: {first_line(error)}",
                hint="try the original module: python:FILE:FACTORY",
            ) from error
        return onnx_ir.from_proto(onnx.load(target))
