"""`FILE.pt2`: a program of torch.export."""

from __future__ import annotations

import logging
import zipfile
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.given_files import check_file
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
    check_file(location)
    program = _load(location)
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


def _load(location: str) -> torch.export.ExportedProgram:
    log = logging.getLogger("torch.export")
    level = log.level
    try:
        with open_regular(location) as file:
            zipfile.ZipFile(file).close()  # which is all that torch says of other files, at length
        log.setLevel(logging.CRITICAL)  # it logs the traceback of what it raises
        return torch.export.load(location)
    except Exception as error:
        raise _foreign(location, (str(error).splitlines() or [type(error).__name__])[0]) from error
    finally:
        log.setLevel(level)


def _foreign(location: str, reason: str) -> ConversionError:
    return ConversionError(
        f"{location} is not a program of torch.export: {reason}",
        hint="one is written by torch.export.save(program, FILE); a file of weights goes beside its architecture: "
        "torchvision:NAME --weights FILE",
    )


def _frozen_module(program: torch.export.ExportedProgram) -> torch.nn.Module:
    module = program.module()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module
