"""PyTorch modules: reference outputs for the proof, and ONNX graphs with a dynamic batch."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, ManifestError
from graphkiln_backend.passes.graph_file import OPSET, save
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_converters.detection import operators
from graphkiln_converters.recipe import Recipe, first_line
from graphkiln_converters.runnable import remove_export_notes
from graphkiln_converters.sources.base import (
    EXPORT_BATCH,
    InputSpec,
    SourceModel,
    run_alone,
    run_in_saved_batches,
    synthetic_samples,
)
from graphkiln_converters.sources.batches import free_and_prove, saved_size, without_batch

# Conversion between tensors and arrays of all types that Triton supports; NumPy has no bf16.

_BF16 = DType.BF16.numpy


def to_tensor(array: AnyArray) -> torch.Tensor:
    """Convert an array to a tensor, without a copy if possible.

    Raises:
        ConversionError: PyTorch lacks the element type, for example text.
    """
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConversionError(
            f"PyTorch has no tensors of {DType.from_numpy(array.dtype)}", hint="provide samples with numbers"
        ) from error


def to_array(tensor: torch.Tensor) -> AnyArray:
    """Convert a tensor to an array.

    Raises:
        ConversionError: Triton lacks the element type, for example complex numbers or 8-bit floats.
    """
    try:
        array: AnyArray = (
            tensor.contiguous().view(torch.int16).numpy().view(_BF16)
            if tensor.dtype is torch.bfloat16
            else tensor.numpy()
        )
        DType.from_numpy(array.dtype)
    except (TypeError, ManifestError) as error:
        raise ConversionError(
            f"a tensor of {tensor.dtype} cannot be served", hint="convert it in forward: .float()"
        ) from error
    return array


# Input specs from an example input.


def input_specs(module: torch.nn.Module, example: Any, *, whole: bool = False) -> tuple[InputSpec, ...]:
    """Return the input specs of a module, named by the parameters of `forward` or the keys of the example.

    Args:
        module: The module.
        example: A batch of inputs: one tensor, a sequence of them, or tensors by parameter name.
        whole: The first dimension is not a batch.

    Raises:
        ConversionError: The example contains something other than tensors.
    """
    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        named = dict(example)
    elif isinstance(example, (tuple, list)):
        parameters = list(inspect.signature(module.forward).parameters)
        names = parameters if len(parameters) >= len(example) else [f"input_{i}" for i in range(len(example))]
        named = dict(zip(names, example, strict=False))
    else:
        raise ConversionError(f"the example input is a {type(example).__name__}, expected tensors")
    return tuple(_spec(name, tensor, 0 if whole else 1) for name, tensor in named.items())


def _spec(name: str, tensor: Any, first: int) -> InputSpec:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < first:
        raise ConversionError(f"the example of input '{name}' must be a tensor with a batch dimension")
    dtype = DType.from_numpy(to_array(torch.empty(0, dtype=tensor.dtype)).dtype)
    high = 2 if tensor.is_floating_point() or not tensor.numel() else int(tensor.max()) + 1
    return InputSpec(name=name, dtype=dtype, shape=tuple(tensor.shape[first:]), high=max(1, high))


# `len(tensor)` returns a Python int, so that PyTorch exports a graph with the fixed batch of the example. RT-DETR in
# transformers gets its batch size like this, and so do many users' models.


@contextmanager
def varying_lengths(module: Any) -> Iterator[None]:
    """Make `len(tensor)` return a symbolic size in the source files of a module and its submodules.

    PyTorch's own files, and those that define `len`, stay unchanged.

    Args:
        module: Module to export; other objects are ignored.
    """
    kinds = {type(part) for part in module.modules()} if isinstance(module, nn.Module) else set()
    globals_of: list[dict[str, Any]] = [getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in kinds]
    changed = [
        names
        for names in {id(names): names for names in globals_of}.values()
        if "len" not in names and str(names.get("__name__", "torch")).partition(".")[0] != "torch"
    ]
    for names in changed:
        names["len"] = first_size
    try:
        yield
    finally:
        for names in changed:
            del names["len"]


def first_size(items: Sized | torch.Tensor) -> Any:
    """Return `len(items)`, or the possibly symbolic first size of a tensor."""
    return items.shape[0] if isinstance(items, torch.Tensor) and items.dim() else len(items)


@dataclass(frozen=True, kw_only=True)
class TorchModel(SourceModel):
    """A PyTorch module; its inputs are in the order of `forward`'s parameters.

    Attributes:
        module: The module in evaluation mode, on the CPU, in fp32.
        keywords: Pass inputs by name.
        outputs: Output names in order; empty to determine them by running the module.
        reference: Module that computes the reference, or None for `module`.
    """

    module: nn.Module
    keywords: bool = False
    outputs: tuple[str, ...] = ()
    reference: nn.Module | None = None

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`.

        Raises:
            ConversionError: The module rejects the input.
        """
        if self.reference:
            return replace(self, module=self.reference, reference=None).run(feeds)
        tensors = {spec.name: to_tensor(feeds[spec.name]) for spec in self.inputs}
        return {name: to_array(tensor) for name, tensor in self._forward(tensors).items()}

    def run_in_fp64(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run_in_fp64`."""
        try:
            module = copy.deepcopy(self.reference or self.module).double()
        except Exception as error:
            raise ConversionError(f"{self.description} cannot be copied: {first_line(error)}") from error
        single = np.dtype(np.float32)
        wide = {name: array.astype(np.float64) if array.dtype == single else array for name, array in feeds.items()}
        return replace(self, module=module, reference=None).run(wide)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`."""
        example = {
            name: to_tensor(array) for name, array in synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0).items()
        }
        batch = torch.export.Dim("batch")
        shapes: dict[str, dict[int, Any]] = {spec.name: {0: batch} for spec in self.inputs}
        for spec in self.inputs:
            for axis, (least, most) in spec.dynamic.items():
                shapes[spec.name][axis + 1] = torch.export.Dim.AUTO(min=least, max=most)  # equal sizes are inferred
        by_position: tuple[Any, ...] = tuple(shapes.values())
        parameters = inspect.signature(self.module.forward).parameters.values()
        if [each.kind for each in parameters] == [inspect.Parameter.VAR_POSITIONAL]:
            by_position = (by_position,)  # torch.export's form for `forward(*inputs)`
        outputs = self.outputs or self._forward(example)
        model = export_module(
            self.module,
            () if self.keywords else tuple(example.values()),
            example if self.keywords else {},
            dynamic_shapes=shapes if self.keywords else by_position,
            input_names=[spec.name for spec in self.inputs],
            output_names=list(outputs),
            description=self.description,
        )
        _check_dynamic(model, self.inputs)
        return model

    def _forward(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            with torch.inference_mode():
                outputs = self.module(**tensors) if self.keywords else self.module(*tensors.values())
        except GraphkilnError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise ConversionError(
                f"{self.description} rejects an input of {shapes}: {first_line(error)}",
                hint="set the sizes of one sample: --shape 3x224x224",
            ) from error
        return named_outputs(outputs)


def freeze(module: nn.Module) -> nn.Module:
    """Put a module in evaluation mode, in fp32, with frozen parameters, and return it."""
    return module.eval().float().requires_grad_(requires_grad=False)


def named_outputs(outputs: Any, prefix: str = "output") -> dict[str, torch.Tensor]:
    """Name a module's outputs: a tensor, or (nested) sequences, mappings and dataclasses of tensors.

    Args:
        outputs: Result of the module.
        prefix: Name of a single tensor, and prefix of the names in a sequence.

    Raises:
        ConversionError: An output is not a tensor.
    """
    if isinstance(outputs, torch.Tensor):
        return {prefix: outputs}
    if isinstance(outputs, Mapping):
        items = [(str(key), value) for key, value in outputs.items() if value is not None]
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        items = [(key, value) for key, value in zip(outputs._fields, outputs, strict=True) if value is not None]
    elif isinstance(outputs, (list, tuple)):
        items = [(f"{prefix}_{number}", value) for number, value in enumerate(outputs)]
    else:
        raise ConversionError(f"the model returns a {type(outputs).__name__}, expected tensors")
    tensors: dict[str, torch.Tensor] = {}
    for key, value in items:
        tensors.update(named_outputs(value, key))
    return tensors


def export_graph(
    module: nn.Module,
    sample: AnyArray,
    path: Path,
    *,
    output_name: str = "OUTPUT_0",
    further_outputs: Sequence[str] = (),
) -> None:
    """Write a module with one input, `INPUT_0`, as an ONNX graph.

    Args:
        module: The trained module; it is put in evaluation mode.
        sample: One sample of the input, `[...]` without the batch dimension.
        path: The .onnx file to write; the weights are inside.
        output_name: Name of the graph's output, or of the first one.
        further_outputs: Names of further outputs.

    Raises:
        ConversionError: PyTorch cannot export the module.
    """
    example = torch.from_numpy(np.stack([sample] * EXPORT_BATCH))
    model = export_module(
        module.eval(),
        (example,),
        {},
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["INPUT_0"],
        output_names=[output_name, *further_outputs],
        description=type(module).__name__,
    )
    remove_export_notes(model)  # a third of a small file, and contain local paths
    onnx_ir.save(model, path)


def run_module(module: nn.Module, samples: AnyArray) -> AnyArray:
    """Compute reference outputs in fp32 and evaluation mode: `[samples, ...]` -> `[samples, ...]`."""
    with torch.inference_mode():
        outputs: AnyArray = module.eval()(torch.from_numpy(samples)).numpy()
    return outputs


def export_module(
    module: nn.Module | torch.export.ExportedProgram,
    arguments: tuple[torch.Tensor, ...],
    keywords: dict[str, torch.Tensor],
    *,
    dynamic_shapes: Any,
    input_names: list[str],
    output_names: list[str],
    description: str,
) -> onnx_ir.Model:
    """Export a module as an ONNX graph.

    Args:
        module: Module in evaluation mode, or an exported program with fixed shapes.
        arguments: Example inputs by position.
        keywords: Example inputs by name, instead of `arguments`.
        dynamic_shapes: As for `torch.export.export`; None for the fixed shapes of the example.
        input_names: Names of the graph's inputs.
        output_names: Names of the graph's outputs.
        description: Name of the model in error messages.

    Raises:
        ConversionError: PyTorch cannot export the module.
    """
    with warnings.catch_warnings(), varying_lengths(module):
        warnings.simplefilter("ignore")  # deprecation warnings inside the exporter
        try:
            program = torch.onnx.export(
                module,
                arguments,
                kwargs=keywords or None,
                dynamo=True,
                dynamic_shapes=dynamic_shapes,
                input_names=input_names,
                output_names=output_names,
                opset_version=OPSET,
                custom_translation_table={**operators.translations(), **_ATTENTION},
                optimize=False,  # graphkiln's passes optimize and prove each step
                verbose=False,
            )
        except Exception as error:
            raise ConversionError(
                f"PyTorch cannot export {description}: {_cause(error)}", hint=_workaround(error)
            ) from error
    if program is None:
        raise ConversionError(f"PyTorch exported nothing for {description}")
    model: onnx_ir.Model = program.model
    return model


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **named: Any) -> Any:
    """Translate attention; a query whose mask hides every key gets zeros, as in PyTorch.

    The exporter's own translation gives the mean of the values for a mask of booleans, and NaN for one of -inf.
    """
    result = aten_scaled_dot_product_attention(query, key, value, attn_mask, *options, **named)
    if attn_mask is None:
        return result
    op: Any = opset18  # its stubs know no traced values
    last = op.Constant(value_ints=[-1])
    if attn_mask.dtype == onnx_ir.DataType.BOOL:
        seen = op.Cast(op.ReduceMax(op.Cast(attn_mask, to=onnx_ir.DataType.INT32), last), to=onnx_ir.DataType.BOOL)
    else:
        seen = op.Greater(op.ReduceMax(attn_mask, last), op.CastLike(op.Constant(value_float=-math.inf), attn_mask))
    return op.Where(seen, result, op.CastLike(op.Constant(value_float=0.0), result))


_ATTENTION: dict[Any, Any] = {torch.ops.aten.scaled_dot_product_attention.default: _attend}


def _check_dynamic(model: onnx_ir.Model, inputs: Sequence[InputSpec]) -> None:
    shapes = {value.name: value.shape for value in model.graph.inputs}
    for spec in inputs:
        for axis in spec.dynamic:
            shape = shapes.get(spec.name)
            if shape is not None and isinstance(shape[axis + 1], int):
                raise ConversionError(
                    f"the model takes only {shape[axis + 1]} in dimension {axis + 1} of input '{spec.name}'",
                    hint="its code depends on that size; leave the dimension out of --dynamic",
                )


def _cause(error: BaseException) -> str:
    """Return the innermost cause, with the user's source line if PyTorch reports one."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    return " ".join((lines or [type(error).__name__])[:2] + places[-1:])


def _workaround(error: BaseException) -> str:
    text = f"{_cause(error)} {error}".lower()
    if "no onnx function" in text or "decomposition" in text or "unsupported" in text or "not supported" in text:
        return "rewrite the operator with basic ones in forward, or cut it off and compute it in the client"
    if "data-dependent" in text or "guard" in text:
        return "the forward branches on values or sizes: replace the branch by torch.where, or fix the dimension"
    return "try the module alone: torch.export.export(module.eval(), (example,))"


# PyTorch programs with a fixed batch: the export is made dynamic afterwards. The reference is the program itself, run
# with its fixed batch.


@dataclass(frozen=True, kw_only=True)
class FixedBatchModel(SourceModel):
    """A program with a fixed batch.

    Attributes:
        program: Program to run, whose inputs include the batch.
        graph: Export of the program; its batch is dynamic unless `whole` is set.
    """

    takes_fixed_batch = True

    program: TorchModel
    graph: onnx_ir.Model

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; other batch sizes are split, and padded with the last row."""
        if self.whole:
            return self.program.run(feeds)
        return run_in_saved_batches(self.program.run, feeds, self.batch_size)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: A requested dynamic dimension has a fixed size in the program.
        """
        shapes = {value.name: value.shape for value in self.graph.graph.inputs}
        for spec in self.inputs:
            for axis in (axis if self.whole else axis + 1 for axis in spec.dynamic):
                shape = shapes.get(spec.name)
                if shape is not None and isinstance(shape[axis], int):
                    raise ConversionError(
                        f"--dynamic: {self.description} takes only {shape[axis]} in dimension {axis} of '{spec.name}'",
                        hint="only the batch can be made dynamic after export",
                    )
        return self.graph


def with_free_batch(
    program: TorchModel, export: Callable[[], onnx_ir.Model], recipe: Recipe, hint: str
) -> FixedBatchModel:
    """Return a program with a fixed batch as a source with a dynamic batch, or unbatched with the reason in `whole`.

    Args:
        program: Program to run, whose inputs include the batch.
        export: Exports the program with its fixed sizes.
        recipe: Recipe with the requested batching.
        hint: Advice for saving the program with a dynamic batch.

    Raises:
        ConversionError: The program cannot be exported.
    """
    graph = export()
    whole = FixedBatchModel(
        program=program,
        graph=graph,
        description=program.description,
        libraries=program.libraries,
        inputs=program.inputs,
        whole="--batch fixed",
    )
    with TemporaryDirectory(prefix="graphkiln-") as folder:
        copy = Path(folder) / "model.onnx"
        save(graph, copy)
        signature = read_signature(copy)
        reason = without_batch(signature)
        if reason or recipe.batch != "free":
            return replace(whole, whole=reason or whole.whole)
        inputs = tuple(
            replace(spec, shape=spec.shape[1:], dynamic={axis - 1: ends for axis, ends in spec.dynamic.items() if axis})
            for spec in program.inputs
        )
        freed = replace(whole, inputs=inputs, batch_size=saved_size(signature), whole="")
        alone = partial(run_alone, program.run, size=freed.batch_size)
        try:
            return replace(freed, graph=free_and_prove(export(), alone, inputs, copy))
        except GraphkilnError as error:
            return replace(whole, whole=f"{error.message} ({hint})")
