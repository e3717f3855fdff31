"""Many requests -> few runs -> one answer each: grouping, one concatenate, and the split back.

Pure numpy, no Triton: `model.py` translates at the edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, SignatureError

Feeds = Mapping[str, AnyArray]


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


def split_rows(outputs: Feeds, rows: Sequence[int]) -> list[dict[str, AnyArray]]:
    """Cuts batched outputs back into one dict per request, as views.

    Args:
        outputs: `[sum(rows), ...]` arrays by name.
        rows: How many rows each request brought.

    Raises:
        ExecutionError: An output has another number of rows: its first dimension is no batch, and a cut would hand out
            wrong answers.
    """
    ends = np.cumsum(rows)
    for name, array in outputs.items():
        if array.shape[:1] != (ends[-1],):
            raise ExecutionError(
                f"output '{name}' has the shape {list(array.shape)} for a batch of {ends[-1]} rows",
                hint="the graph mixes its rows: serve it with max_batch_size: 0",
            )
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for end, count in zip(ends, rows, strict=True)
    ]


def cut_to_batches(feeds: Feeds, size: int) -> list[tuple[Feeds, int]]:
    """Cuts a batch for a graph whose batch is fixed: full batches, the last one padded with copies of its last row.

    Copies, not zeros: a made-up row could fail (a division, an index) where the user's rows do not.

    Args:
        feeds: `[rows, ...]` arrays by name.
        size: The graph's own batch.

    Returns:
        Batches of exactly `size` rows, each with the number of its rows that count.

    Raises:
        SignatureError: There is no row.
    """
    rows = len(next(iter(feeds.values())))
    if rows == 0:
        raise SignatureError("the batch is empty", expected="at least one row", got="none")
    batches: list[tuple[Feeds, int]] = []
    for start in range(0, rows, size):
        count = min(size, rows - start)
        chunk = {name: array[start : start + count] for name, array in feeds.items()}
        if count < size:
            chunk = {
                name: np.concatenate([array, np.repeat(array[-1:], size - count, axis=0)])
                for name, array in chunk.items()
            }
        batches.append((chunk, count))
    return batches


class Concatenator:
    """Joins the tensors of several requests along the batch, in buffers that are kept between batches.

    The result is a view of a buffer and is valid until the next call. Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, AnyArray] = {}

    def join(self, requests: Sequence[Feeds]) -> Feeds:
        """Concatenates along the first dimension; a single request is passed through without a copy."""
        if len(requests) == 1:
            return requests[0]
        return {name: self._join_tensor(name, [feeds[name] for feeds in requests]) for name in requests[0]}

    def _join_tensor(self, name: str, arrays: list[AnyArray]) -> AnyArray:
        rows = sum(len(array) for array in arrays)
        buffer = self._buffers.get(name)
        first = arrays[0]
        if buffer is None or len(buffer) < rows or buffer.shape[1:] != first.shape[1:] or buffer.dtype != first.dtype:
            buffer = self._buffers[name] = np.empty((rows, *first.shape[1:]), first.dtype)
        return np.concatenate(arrays, out=buffer[:rows])
