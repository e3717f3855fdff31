"""Comparison of two rankings of classes: an embedded top-k, judged by the scores of its classes.

Two graphs that differ by rounding order near ties differently. A class in another place is as wrong as its score is far
from the one that belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Ranking

Arrays = Mapping[str, AnyArray]


def score_indices(reference: Arrays, outputs: Arrays, ranking: Ranking) -> tuple[Arrays, Arrays]:
    """Replace class indices on both sides by the scores that the reference gives to those classes.

    A class outside the reference's best k has at most the score of the last of them, and gets that.

    Args:
        reference: Trusted outputs by name, `[samples, k]` of scores and of indices among them.
        outputs: Outputs to judge.
        ranking: Which of them are ranked.

    Returns:
        Reference and outputs; unchanged where the indices cannot be compared at all, for the comparison to say so.
    """
    if not _are_indices(reference, outputs, ranking):
        return reference, outputs
    best, scores = reference[ranking.indices], reference[ranking.scores]
    chosen = outputs[ranking.indices]
    matches = chosen[..., :, np.newaxis] == best[..., np.newaxis, :]
    matched = np.take_along_axis(scores, matches.argmax(axis=-1), axis=-1)
    chosen_scores = np.where(matches.any(axis=-1), matched, scores[..., -1:])
    return {**reference, ranking.indices: scores}, {**outputs, ranking.indices: chosen_scores.astype(scores.dtype)}


def scatter_scores(scores: AnyArray, indices: AnyArray, classes: int) -> AnyArray:
    """Spread the scores of the best k over all classes; every other class gets the last of them.

    Args:
        scores: Best first, `[samples, k]`.
        indices: Their classes, `[samples, k]`.
        classes: Number of classes; more than any index.

    Returns:
        A new array `[samples, classes]`.
    """
    scattered = np.repeat(scores[:, -1:], classes, axis=1)
    np.put_along_axis(scattered, indices.astype(np.int64), scores, axis=1)
    return scattered


def _are_indices(reference: Arrays, outputs: Arrays, ranking: Ranking) -> bool:
    """Return true where the outputs hold a class index for each of the reference's scores."""
    expected, judged = reference[ranking.indices], outputs[ranking.indices]
    alike = expected.shape == judged.shape == reference[ranking.scores].shape and expected.dtype == judged.dtype
    return alike and bool(expected.size) and int(judged.min()) >= 0
