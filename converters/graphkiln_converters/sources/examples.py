"""Input specs from an example input."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.tensors import to_array


def input_specs(module: torch.nn.Module, example: Any, *, whole: bool = False) -> tuple[InputSpec, ...]:
    """Inputs of a module, named by its `forward` or by the example.

    Args:
        module: The module.
        example: A batch of inputs: one tensor, a sequence of them, or tensors by parameter name.
        whole: Whether the first dimension is one as others are.

    Raises:
        ConversionError: The example is something else.
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
