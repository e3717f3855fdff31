"""Input specs from an example input."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import InputSpec


def input_specs(module: torch.nn.Module, example: Any) -> tuple[InputSpec, ...]:
    """Inputs of a module, named by its `forward` or by the example.

    Args:
        module: The module.
        example: A batch of inputs: one tensor, a sequence of them, or tensors by parameter name.

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
    return tuple(_spec(name, tensor) for name, tensor in named.items())


def _spec(name: str, tensor: Any) -> InputSpec:
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise ConversionError(f"the example of input '{name}' must be a tensor with a batch dimension")
    dtype = DType.from_numpy(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
    high = 2 if tensor.is_floating_point() or not tensor.numel() else int(tensor.max()) + 1
    return InputSpec(name=name, dtype=dtype, shape=tuple(tensor.shape[1:]), high=max(1, high))
