"""Whether two graphs embed the same samples alike: by the cosine of each vector with its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.task_decision import Metric, TaskDecision

Arrays = Mapping[str, AnyArray]
_CONTROL_SCALE = 3.0
"""A control is turned by this many times the angle that the row allows."""


def cosines(vectors: AnyArray, others: AnyArray) -> npt.NDArray[np.float64]:
    """Of vectors of the same row, `[samples]`; 1 for two that are zero, 0 where one of them is."""
    left, right = vectors.astype(np.float64), others.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    alike = np.all(left == right, axis=1).astype(np.float64)
    return np.asarray(np.divide(np.sum(left * right, axis=1), lengths, out=alike, where=lengths > 0))


def decide_vectors(
    task: Embedding, reference: Arrays, outputs: Arrays, limits: Limits, metric: Metric | None = None
) -> TaskDecision:
    """Compares the directions of vectors, sample by sample: the error of a batch hides a single vector that turned.

    Args:
        task: Which output holds them.
        reference: Trusted outputs by name, `[samples, features]`.
        outputs: Outputs to judge, of the same shape.
        limits: Row of the policy.
        metric: How good both are, where that is known.
    """
    found = cosines(reference[task.vectors], outputs[task.vectors])
    return TaskDecision(
        what=f"vectors with a cosine of {limits.tasks.cosine:.10g} or more",
        agreeing=int(np.sum(found >= limits.tasks.cosine)),
        total=len(found),
        least=1.0,
        detail=f"the worst has {found.min():.7g}" if len(found) else "",
        metric=metric,
    )


def vector_controls(task: Embedding, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """A copy of the reference that no working check lets pass: the longest vector, turned beyond the row's angle."""
    vectors = reference[task.vectors]
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    if vectors.shape[1] < 2 or not lengths.any():
        return
    row = int(lengths.argmax())
    angle = min(np.pi / 2, _CONTROL_SCALE * float(np.arccos(limits.tasks.cosine)))
    turned = np.array(vectors)
    turned[row] = _turn(vectors[row].astype(np.float64), angle)
    yield "a vector rotated", {**reference, task.vectors: turned}


def _turn(vector: npt.NDArray[np.float64], angle: float) -> npt.NDArray[np.float64]:
    """The vector, turned by an angle in radians towards the axis that it has least of."""
    across = np.zeros_like(vector)
    across[np.abs(vector).argmin()] = 1.0
    across -= vector * (across @ vector) / (vector @ vector)
    return np.asarray(np.cos(angle) * vector + np.sin(angle) * np.linalg.norm(vector) * across / np.linalg.norm(across))
