"""Rows run in batches of a size, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.edge import Arrays


def run_in_batches(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run samples in batches of a size, the last one smaller where they do not divide, and join the outputs.

    Raises:
        ConversionError: An output has not as many rows as the batch, or sizes that depend on the values.
    """
    samples = len(next(iter(feeds.values())))
    batches = []
    for start in range(0, samples, size):
        batch = {name: array[start : start + size] for name, array in feeds.items()}
        rows, outputs = min(size, samples - start), run(batch)
        for name, array in outputs.items():
            if array.shape[:1] != (rows,):
                raise ConversionError(
                    f"output '{name}' has the shape {list(array.shape)} for a batch of {rows}",
                    hint="the model bakes its batch in, or mixes its rows: leave the output out, or mend the model",
                )
        batches.append(outputs)
    return {name: _joined(name, [batch[name] for batch in batches]) for name in batches[0]}


def run_in_saved_batches(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run any number of rows through what takes batches of one size: the last batch is filled with its last row.

    An output whose first dimension is not the batch stays as it is, and fails the proof.
    """
    rows = len(next(iter(feeds.values())))
    batches = []
    for start in range(0, rows, size):
        parts = {name: array[start : start + size] for name, array in feeds.items()}
        batches.append(run({name: _filled(array, size) for name, array in parts.items()}))
    return {
        name: np.concatenate([batch[name] for batch in batches])[:rows]
        if first.shape[:1] == (size,)
        else np.atleast_1d(first)[:rows]
        for name, first in batches[0].items()
    }


def run_alone(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run rows one by one through what takes batches of one size: each row fills a batch."""
    rows = [
        run({name: np.repeat(array[i : i + 1], size, axis=0) for name, array in feeds.items()})
        for i in range(len(next(iter(feeds.values()))))
    ]
    return {name: np.concatenate([row[name][:1] for row in rows]) for name in rows[0]}


def _filled(rows: AnyArray, size: int) -> AnyArray:
    return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])


def _joined(name: str, parts: Sequence[AnyArray]) -> AnyArray:
    sizes = {array.shape[1:] for array in parts}
    if len(sizes) > 1:
        raise ConversionError(
            f"the shape of output '{name}' depends on the values: {' and '.join(map(str, map(list, sorted(sizes))))} "
            "for rows of other samples",
            hint="give samples that agree (--samples), leave the output out (--outputs), or serve the ONNX file itself "
            "as NAME/1/model.onnx with max_batch_size: 0",
        )
    return np.concatenate(parts)
