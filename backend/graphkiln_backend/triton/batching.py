"""Many requests, few runs, one result for each: grouping, one concatenation, and the split back. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError

Feeds = dict[str, AnyArray]
"""Arrays by input name."""


def batch_size(feeds: Feeds) -> int:
    """Rows of a batch: the first dimension of its first tensor."""
    return len(next(iter(feeds.values())))


def group_by_shape(requests: Sequence[Feeds]) -> list[list[int]]:
    """Groups requests that can share one run: equal names and equal shapes but for the first dimension.

    Returns:
        Indices into `requests`; groups in the order of their first request, requests in order within a group.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, feeds in enumerate(requests):
        key = tuple((name, array.shape[1:]) for name, array in feeds.items())
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def split_batch(outputs: Feeds, sizes: Sequence[int]) -> list[dict[str, AnyArray]]:
    """Splits the outputs of a batch into those of each request, as views.

    Args:
        outputs: `[sum(sizes), ...]` arrays by name.
        sizes: Rows of each request.

    Raises:
        ExecutionError: An output has another number of rows: its first dimension is not the batch, and a split would
            return wrong outputs.
    """
    ends = np.cumsum(sizes)
    for name, array in outputs.items():
        if array.shape[:1] != (ends[-1],):
            raise ExecutionError(
                f"output '{name}' has the shape {list(array.shape)} for a batch of {ends[-1]} rows",
                hint="the graph mixes its rows: serve it with max_batch_size: 0",
            )
    return [
        {name: array[end - size : end] for name, array in outputs.items()}
        for end, size in zip(ends, sizes, strict=True)
    ]


class Concatenator:
    """Concatenates the tensors of several requests along the batch, in buffers that are kept between batches.

    The result is a view of a buffer and is valid until the next call. Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, AnyArray] = {}

    def concatenate(self, requests: Sequence[Feeds]) -> Feeds:
        """Concatenates along the first dimension; a single request is passed through without a copy."""
        if len(requests) == 1:
            return requests[0]
        return {name: self._concatenate(name, [feeds[name] for feeds in requests]) for name in requests[0]}

    def _concatenate(self, name: str, arrays: list[AnyArray]) -> AnyArray:
        rows = sum(len(array) for array in arrays)
        buffer = self._buffers.get(name)
        first = arrays[0]
        if buffer is None or len(buffer) < rows or buffer.shape[1:] != first.shape[1:] or buffer.dtype != first.dtype:
            buffer = self._buffers[name] = np.empty((rows, *first.shape[1:]), first.dtype)
        return np.concatenate(arrays, out=buffer[:rows])
