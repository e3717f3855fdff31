"""`python:FILE_OR_MODULE:FACTORY`: any `nn.Module` that a function (or class) of the user's returns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_converters.given_files import check_file
from graphkiln_converters.sources.base import InputSpec, SourceOptions
from graphkiln_converters.sources.examples import input_specs
from graphkiln_converters.sources.nested import Flattened, flat_inputs, is_nested
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.torch_libraries import prepare_torchvision
from graphkiln_converters.weights import load_weights


def open_source(location: str, options: SourceOptions) -> TorchModel:
    """Calls the factory. It returns the module, or `(module, example)` with a batch of inputs: tensor, tuple or dict.

    Tensors in tuples, lists and dicts inside of the example become inputs of their own.

    Raises:
        ConversionError: There is no such file or factory, it fails, or the input's shape is not known.
    """
    place, separator, factory_name = location.rpartition(":")
    if not separator:
        raise ConversionError(f"'python:{location}' names no factory", hint="write python:FILE_OR_MODULE:FACTORY")
    factory = _factory(_import(place), factory_name, place)
    try:
        returned = factory()
    except Exception as error:
        raise ConversionError(f"{factory_name} of {place} fails: {type(error).__name__}: {error}") from error
    module, example = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(module, torch.nn.Module):
        raise ConversionError(
            f"{factory_name} of {place} returns a {type(module).__name__}, expected a torch.nn.Module",
            hint="return the module, or (module, example input)",
        )
    if options.weights:
        load_weights(module, options.weights)
    if example is None and not options.shapes:
        raise ConversionError(
            f"the shape of {factory_name}'s input is not known",
            hint="give the sizes of one sample (--shape 3x224x224), or return (module, example input) from the factory",
        )
    nested = is_nested(example)
    if nested:
        module, example = Flattened(module, example), flat_inputs(module, example)
    inputs = input_specs(module, example) if example is not None else _specs(options)
    return TorchModel(
        module=freeze(module),
        description=f"python:{location}",
        libraries=("torch",),
        inputs=inputs,
        keywords=not nested and (isinstance(example, dict) or (example is None and "" not in options.shapes)),
    )


def _specs(options: SourceOptions) -> tuple[InputSpec, ...]:
    return tuple(InputSpec(name=name or "input", shape=shape) for name, shape in options.shapes.items())


def _import(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix == ".py":
        check_file(path)
    try:
        prepare_torchvision()  # the code may import it, as most libraries of models do
        return _import_file(path) if path.suffix == ".py" else importlib.import_module(place)
    except Exception as error:
        raise ConversionError(f"cannot import {place}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbors
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _factory(module: ModuleType, name: str, place: str) -> Any:
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConversionError(f"{place} has no function '{name}'", hint=did_you_mean(name, known))
    return factory
