"""`FILE.pt2`: a torch.export program."""

from __future__ import annotations

import logging
import zipfile
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import synthetic_samples
from graphkiln_converters.sources.pytorch import (
    FixedBatchModel,
    TorchModel,
    export_module,
    input_specs,
    with_free_batch,
)

_HINT = "to have it batched, export it with dynamic_shapes={'x': {0: torch.export.Dim.DYNAMIC}, ...}"
# Operator -> index of its training flag. Source: PyTorch, native_functions.yaml.
_MODES = {
    "aten.batch_norm.default": 5,
    "aten._native_batch_norm_legit.default": 5,
    "aten._native_batch_norm_legit_functional.default": 5,
    "aten.dropout.default": 2,
    "aten.native_dropout.default": 2,
}
_STATISTICS = 3


def open_source(location: str, recipe: Recipe) -> TorchModel | FixedBatchModel:
    """Load a program, whose example inputs define the inputs.

    A fixed batch is made dynamic if the results can be verified.

    Raises:
        ConversionError: The file is missing, damaged, or has no example inputs.
    """
    check_file(location)
    program = _load(location)
    if program.example_inputs is None:
        raise ConversionError(f"{location} was saved without example inputs", hint="save it with torch.export.save")
    _check_trained(program, location)
    example = _example(program, location)
    sizes = {name: _sizes(program, name) for name in example}
    module = program.module()
    for parameter in module.parameters():  # `freeze` does not apply: the mode of a program is fixed
        parameter.requires_grad_(False)
    fixed = not all(shape and isinstance(shape[0], torch.SymInt) for shape in sizes.values())
    inputs = input_specs(module, example, whole=fixed)
    model = TorchModel(
        module=module,
        description=location,
        libraries=("torch",),
        inputs=inputs,
        keywords=bool(program.example_inputs[1]),
    )
    if not fixed:
        return model
    varying = tuple(
        replace(spec, dynamic=_ranges(program, shape, spec.shape))
        for shape, spec in zip(sizes.values(), inputs, strict=True)
    )
    return with_free_batch(replace(model, inputs=varying), lambda: _export(program, model), recipe, _HINT)


def _check_trained(program: torch.export.ExportedProgram, location: str) -> None:
    """Reject active dropout and normalization by batch statistics."""
    if names := [node.name for node in program.graph.nodes if _trains(node)]:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise ConversionError(
            f"{location} was exported in training mode, and would not return its trained results: {names[0]}{more}",
            hint="export it in evaluation mode: torch.export.export(model.eval(), ...)",
        )


def _trains(node: torch.fx.Node) -> bool:
    """Return True for a node in training mode, except dropout of 0 and normalization without running statistics."""
    mode = _MODES.get(str(node.target), len(node.args))
    if mode >= len(node.args) or node.args[mode] is not True:
        return False
    return bool(node.args[1] != 0) and (mode < _STATISTICS or node.args[_STATISTICS] is not None)


def _example(program: torch.export.ExportedProgram, location: str) -> dict[str, Any]:
    """Return the example inputs by name."""
    positional, keywords = program.example_inputs
    if positional and keywords:
        raise ConversionError(f"{location} takes positional and keyword inputs", hint="export it with one kind only")
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    example: dict[str, Any] = keywords or dict(zip(names, positional, strict=False))
    if len(example) != len(names):
        raise ConversionError(
            f"{location} takes lists or dicts of tensors",
            hint="make each tensor an argument of forward",
        )
    return example


def _sizes(program: torch.export.ExportedProgram, name: str) -> tuple[Any, ...]:
    """Return the shape of an input: integers, or symbols for dynamic sizes."""
    value = next(node.meta.get("val") for node in program.graph.nodes if node.name == name)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _ranges(
    program: torch.export.ExportedProgram, sizes: tuple[Any, ...], usual: tuple[int, ...]
) -> dict[int, tuple[int, int]]:
    """Return the range of each dynamic dimension of an input, at most twice its typical size."""
    dynamic = {}
    for axis, (size, typical) in enumerate(zip(sizes, usual, strict=True)):
        bounds = program.range_constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if bounds is not None:
            dynamic[axis] = (max(1, int(min(bounds.lower, typical))), int(min(bounds.upper, 2 * typical)))
    return dynamic


def _export(program: torch.export.ExportedProgram, model: TorchModel) -> onnx_ir.Model:
    """Export the graph of a program with its fixed sizes."""
    feeds = synthetic_samples(model.inputs, 1, {}, seed=0)
    return export_module(
        program,
        (),
        {},
        dynamic_shapes=None,
        input_names=list(feeds),
        output_names=list(model.run({name: np.asarray(array[0]) for name, array in feeds.items()})),
        description=model.description,
    )


def _load(location: str) -> torch.export.ExportedProgram:
    log = logging.getLogger("torch.export")
    level = log.level
    try:
        with open_regular(location) as file:
            zipfile.ZipFile(file).close()  # torch's own error for other files is long and no clearer
        log.setLevel(logging.CRITICAL)  # torch logs the traceback of errors that it raises
        return torch.export.load(location)
    except Exception as error:
        raise ConversionError(
            f"{location} is not a torch.export program: {first_line(error)}",
            hint="save a program with torch.export.save(program, FILE); a file of weights needs an architecture: "
            "torchvision:NAME --weights FILE",
        ) from error
    finally:
        log.setLevel(level)
