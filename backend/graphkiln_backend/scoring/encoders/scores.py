"""The scores of all classes, in the order of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from graphkiln_backend.graph import task as topk
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.scoring.encoders.arrays import arrow_type, lists
from graphkiln_backend.scoring.encoders.base import Size

_RANK = 2


class AllScores:
    """The column `scores`: a list of one length, a score per class.

    Args:
        output: Name of the output of scores, `[rows, classes]` or `[rows]`.
        dtype: Of its elements.
        classes: How many there are.
        softmax: Whether scores become probabilities, computed in double precision as the client does.
    """

    def __init__(self, output: str, dtype: DType, classes: int, *, softmax: bool = False) -> None:
        self.outputs: Sequence[str] = (output,)
        self._classes, self._softmax = classes, softmax
        self._dtype = score_dtype(dtype, softmax=softmax)
        self.schema = pa.schema([pa.field("scores", pa.list_(arrow_type(self._dtype)))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """One list per row."""
        del sizes
        scores = scores_of(outputs, self.outputs[0])
        if scores.shape[1] != self._classes:
            raise ExecutionError(f"output '{self.outputs[0]}' has {scores.shape[1]} scores, expected {self._classes}")
        written = topk.softmax(scores) if self._softmax else scores.astype(self._dtype.numpy, copy=False)
        return [lists(written)]


def score_dtype(dtype: DType, *, softmax: bool) -> DType:
    """What scores are written as: fp64 for probabilities, fp32 for 16-bit floats, which not every reader knows."""
    if softmax:
        return DType.FP64
    return DType.FP32 if dtype in (DType.FP16, DType.BF16) else dtype


def scores_of(outputs: Mapping[str, AnyArray], name: str) -> AnyArray:
    """An output as `[rows, classes]`; one score per row is that of the only class.

    Args:
        outputs: By name.
        name: Which.

    Raises:
        ExecutionError: It has another number of dimensions.
    """
    scores = outputs[name]
    if scores.ndim == 1:
        return scores[:, None]
    if scores.ndim != _RANK:
        raise ExecutionError(
            f"output '{name}' has the shape {list(scores.shape)}, expected [rows, classes]",
            hint=f"--output {name} writes it as it is",
        )
    return scores
