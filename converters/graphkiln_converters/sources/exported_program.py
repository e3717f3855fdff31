"""`FILE.pt2`: a program of torch.export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.examples import input_specs
from graphkiln_converters.sources.pytorch import TorchModel


def open_source(location: str, options: SourceOptions) -> TorchModel:
    """Loads a program; its example inputs define its inputs.

    Raises:
        ConversionError: The file is missing, damaged, holds no example inputs, or has a fixed batch.
    """
    if options.weights:
        raise ConversionError(f"{location} holds its own weights", hint="leave --weights out")
    if not Path(location).exists():
        raise ConversionError(f"there is no file {location}")
    try:
        open_regular(location).close()
        program = torch.export.load(location)
    except Exception as error:
        raise ConversionError(f"{location} is not a program of torch.export: {error}") from error
    if program.example_inputs is None:
        raise ConversionError(f"{location} was saved without example inputs", hint="save it with torch.export.save")
    positional, keywords = program.example_inputs
    if positional and keywords:
        raise ConversionError(f"{location} takes positional and keyword inputs", hint="export it with one kind only")
    module = _frozen_module(program)
    example: Any = keywords or positional
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    inputs = input_specs(module, dict(zip(names, positional, strict=False)) if positional else example)
    if not program.range_constraints:
        raise ConversionError(
            f"the batch of {location} is fixed",
            hint="export it with dynamic_shapes={'x': {0: torch.export.Dim('batch')}}",
        )
    return TorchModel(module=module, description=location, libraries=("torch",), inputs=inputs, keywords=bool(keywords))


def _frozen_module(program: torch.export.ExportedProgram) -> torch.nn.Module:
    module = program.module()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module
