"""Whether a new version can take the requests of an older one: names, types, dims and batching of its tensors.

Triton has one signature for all versions of a model, and gives requests that name no version to the newest: a version
with another signature would break every client of the older one. More is no contradiction: another output, an optional
input, an input dimension that varies where it was fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphkiln_backend.repository.config import ModelConfigProto

HINT = "convert it under another --name, or take the versions that have the other signature out of the store"


def find_disagreement(new: ModelConfigProto, old: ModelConfigProto) -> str:
    """What a client of one configuration would find changed under another; empty for nothing.

    Args:
        new: Complete.
        old: Complete.
    """
    return "; ".join(_disagreements(new, old))


def _disagreements(new: ModelConfigProto, old: ModelConfigProto) -> Iterator[str]:
    if (new.max_batch_size > 0) != (old.max_batch_size > 0):
        yield "it takes batches" if new.max_batch_size > 0 else "it takes no batches"
    yield from _missing("output", new.output, old.output)
    yield from _missing("input", new.input, old.input)
    before = {tensor.name for tensor in old.input}
    for tensor in new.input:
        if tensor.name not in before and not tensor.optional:
            yield f"input '{tensor.name}' is new"


def _missing(kind: str, new: Sequence[Any], old: Sequence[Any]) -> Iterator[str]:
    found = {tensor.name: tensor for tensor in new}
    for tensor in old:
        name = f"{kind} '{tensor.name}'"
        if tensor.name not in found:
            yield f"{name} is missing"
        elif not _fits(kind, found[tensor.name], tensor):
            yield f"{name} is {_text(found[tensor.name])}, not {_text(tensor)}"
        elif kind == "input" and tensor.optional and not found[tensor.name].optional:
            yield f"{name} is no longer optional"


def _fits(kind: str, new: Any, old: Any) -> bool:
    if new.data_type != old.data_type or len(new.dims) != len(old.dims):
        return False
    return all(
        now in (before, -1) or (before == -1 and kind == "output")
        for now, before in zip(new.dims, old.dims, strict=True)
    )


def _text(tensor: Any) -> str:
    types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return f"{types[tensor.data_type].name.removeprefix('TYPE_')} {list(tensor.dims)}"
