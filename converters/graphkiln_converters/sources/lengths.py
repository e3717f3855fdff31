"""`len(tensor)` in the code of a model, as an export has to see it: a size that varies, and not a number.

Python turns what `len` returns into a number, and PyTorch then exports a graph that takes the batch of its example
alone. RT-DETR and its kin in transformers ask for their batch so, and so does many a model of users.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def varying_lengths(module: Any) -> Iterator[None]:
    """Has `len(tensor)` give the tensor's first size, in the files that a module's code stands in.

    Everything else has the length that it always had. PyTorch's own files are left alone.

    Args:
        module: What is exported; of what is no `nn.Module` nothing is changed.
    """
    changed = _namespaces(module) if isinstance(module, nn.Module) else []
    for names in changed:
        names["len"] = first_size
    try:
        yield
    finally:
        for names in changed:
            del names["len"]


def first_size(items: Sized | torch.Tensor) -> Any:
    """What `len` returns, but for a tensor of one dimension and more a size that may be symbolic."""
    return items.shape[0] if isinstance(items, torch.Tensor) and items.dim() else len(items)


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """The global names of the code of a module's parts, each once, but for those that have a `len` of their own."""
    found = {id(names): names for names in map(_globals_of, {type(part) for part in module.modules()})}
    return [names for names in found.values() if "len" not in names and not _is_of_torch(names)]


def _globals_of(kind: type[nn.Module]) -> dict[str, Any]:
    names: dict[str, Any] = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    return names


def _is_of_torch(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "torch")).partition(".")[0] == "torch"
