"""Runs samples in batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.edge import Arrays


def run_in_batches(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Runs samples in batches of a size, the last one smaller where they do not divide, and joins the outputs.

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
