"""`python:FILE_OR_MODULE:FACTORY`: any `nn.Module` returned by a function or class of the user."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.recipe import Recipe, check_file
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.pytorch import TorchModel, freeze, input_specs
from graphkiln_converters.torch_libraries import prepare_torchvision
from graphkiln_converters.weights import load_weights


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Call the factory, which returns the module, or `(module, example)` with a batch of inputs: tensor, tuple or dict.

    Tensors in tuples, lists and dicts inside of the example become separate inputs.

    Raises:
        ConversionError: There is no such file or factory, it fails, or the input's shape is not known.
    """
    place, separator, factory_name = location.rpartition(":")
    if not separator:
        raise ConversionError(f"'python:{location}' has no factory", hint="write python:FILE_OR_MODULE:FACTORY")
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
    if recipe.weights:
        load_weights(module, recipe.weights)
    if example is None and not recipe.shapes:
        raise ConversionError(
            f"the shape of {factory_name}'s input is unknown",
            hint="give the sizes of one sample (--shape 3x224x224), or return (module, example input) from the factory",
        )
    return module_source(module, example, recipe, description=f"python:{location}")


def module_source(module: nn.Module, example: Any, recipe: Recipe, *, description: str) -> TorchModel:
    """Return a module as a source.

    Args:
        module: The module.
        example: A batch of inputs: tensor, tuple or dict, in which tensors may be nested; None for the recipe's shapes.
        recipe: Recipe with shapes, if there is no example.
        description: The source as the user wrote it.

    Raises:
        ConversionError: The example has no tensors, or others than the module takes.
    """
    nested = is_nested(example)
    if nested:
        module, example = Flattened(module, example), flat_inputs(module, example)
    if example is not None:
        inputs = input_specs(module, example)
    else:
        inputs = tuple(InputSpec(name=name or "input", shape=shape) for name, shape in recipe.shapes.items())
    return TorchModel(
        module=freeze(module),
        description=description,
        libraries=("torch",),
        inputs=inputs,
        keywords=not nested and (isinstance(example, dict) or (example is None and "" not in recipe.shapes)),
    )


def _import(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix == ".py":
        check_file(path)
    try:
        prepare_torchvision()  # the code may import torchvision
        return _import_file(path) if path.suffix == ".py" else importlib.import_module(place)
    except Exception as error:
        raise ConversionError(f"cannot import {place}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbors
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a module")
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


# Modules whose inputs are nested: tensors in tuples, lists and dicts, each of which becomes an input of the graph.
#
# Names are paths: `past_0_1` is the second tensor of the first element of `past`, `past_key` is `past["key"]`. Values
# that are no tensors, such as flags and None, are constants from the example.

# Types of constants in an example.
_OTHER = (bool, int, float, str, type(None))


class Flattened(nn.Module):
    """Take the tensors of an example one by one, and call a module with the nested structure of the example.

    Args:
        module: The module.
        example: Its inputs: a tuple by position, or a dict by name.
    """

    def __init__(self, module: nn.Module, example: Any) -> None:
        super().__init__()
        self.module = module
        leaves, self._structure = tree_flatten(_plain(example))
        # Placeholders for tensors, so that the module does not keep the example.
        self._leaves = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Tensors in the order of `flat_inputs` -> outputs of the module."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is torch.Tensor else leaf for leaf in self._leaves]
        given = tree_unflatten(leaves, self._structure)
        return self.module(**given) if isinstance(given, dict) else self.module(*given)


def _plain(example: Any) -> Any:
    """Replace containers that PyTorch's pytree does not know, such as BatchEncoding, by dicts and lists."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return _plain(dict(leaf))
        return _plain(list(leaf)) if isinstance(leaf, list | tuple) else leaf

    return tree_map(replaced, example)


def is_nested(example: Any) -> bool:
    """Return true if an example has anything but one tensor per input."""
    if isinstance(example, Mapping):
        example = list(example.values())
    return isinstance(example, list | tuple) and not all(isinstance(each, torch.Tensor) for each in example)


def flat_inputs(module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """The tensors of an example by name, in order.

    Args:
        module: Module whose `forward` names positional inputs.
        example: A tuple by position, or a dict by name.

    Raises:
        ConversionError: The example has an unsupported value, two inputs with the same name, or no tensor.
    """
    named = example
    if not isinstance(example, Mapping):
        parameters = list(inspect.signature(module.forward).parameters)
        if len(parameters) < len(example):  # `*inputs`
            parameters = [f"input_{number}" for number in range(len(example))]
        named = dict(zip(parameters, example, strict=False))
    found: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        for own, tensor in _tensors(str(name), value):
            if own in found:
                raise ConversionError(
                    f"two tensors of the example would have the name '{own}'", hint="rename a key of the example"
                )
            found[own] = tensor
    if not found:
        raise ConversionError("the example input has no tensor", hint="return (module, example input) with tensors")
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}_{key}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}_{number}", each)
    elif not isinstance(value, _OTHER):
        raise ConversionError(
            f"the example of input '{name}' is a {type(value).__name__}, expected tensors in tuples, lists and dicts",
            hint="wrap the module in one that takes tensors and makes its inputs from them",
        )
