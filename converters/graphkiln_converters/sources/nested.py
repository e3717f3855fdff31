"""Modules whose inputs are nested: tensors in tuples, lists and dicts, each of which becomes an input of the graph.

Each is named by its place: `past_0_1` is the second tensor of the first element of `past`, `past_key` what the dict
`past` holds as `key`. What is no tensor, such as a flag or None, stays what it is in the example.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError

_OTHER = (bool, int, float, str, type(None))
"""What an example may hold beside tensors."""


class Flattened(nn.Module):
    """Takes the tensors of an example one by one, and calls a module with them as the example holds them.

    Args:
        module: The module.
        example: Its inputs: a tuple by position, or a dict by name.
    """

    def __init__(self, module: nn.Module, example: Any) -> None:
        super().__init__()
        self.module = module
        self._example = _without_tensors(example)

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The tensors in the order of `flat_inputs` -> what the module returns."""
        given = _with_tensors(self._example, iter(tensors))
        return self.module(**given) if isinstance(given, dict) else self.module(*given)


def is_nested(example: Any) -> bool:
    """Whether an example holds anything but a tensor for each input."""
    if isinstance(example, Mapping):
        example = list(example.values())
    return isinstance(example, list | tuple) and not all(isinstance(each, torch.Tensor) for each in example)


def flat_inputs(module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """The tensors of an example by name, in order.

    Args:
        module: Its `forward` names what the example gives by position.
        example: A tuple by position, or a dict by name.

    Raises:
        ConversionError: It holds something that is no input, two of the same name, or no tensor.
    """
    named = example
    if not isinstance(example, Mapping):
        named = dict(zip(_parameters(module, len(example)), example, strict=True))
    found: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        for own, tensor in _tensors(str(name), value):
            if own in found:
                raise ConversionError(
                    f"the example has two tensors that would be called '{own}'", hint="rename a key of the example"
                )
            found[own] = tensor
    if not found:
        raise ConversionError("the example input holds no tensor", hint="return (module, example input) with tensors")
    return found


def _parameters(module: nn.Module, count: int) -> list[str]:
    """Names of what is given by position; of `*inputs`, numbered ones."""
    names = list(inspect.signature(module.forward).parameters)
    return names[:count] if len(names) >= count else [f"input_{number}" for number in range(count)]


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
            hint="wrap the module in one that takes tensors and makes of them what it needs",
        )


def _without_tensors(value: Any) -> Any:
    """The same nesting, with a mark for each tensor: an example is no part of a module."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, Mapping):
        return {key: _without_tensors(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return _as(value, [_without_tensors(each) for each in value])
    return value


def _with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if value is torch.Tensor:
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return _as(value, [_with_tensors(each, tensors) for each in value])
    return value


def _as(like: Any, items: Sequence[Any]) -> Any:
    """Items in a sequence of the same kind: a list, a tuple, or a tuple with names."""
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return list(items) if isinstance(like, list) else tuple(items)
