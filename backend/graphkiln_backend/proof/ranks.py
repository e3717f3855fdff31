"""Are two rankings of classes equally good: an embedded top-k, judged by the scores of what was chosen.

Two graphs that differ by rounding order near ties differently. A class in another place is as wrong as its score is
away from the one that belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.ranking import Ranking

Arrays = Mapping[str, AnyArray]


def comparable(reference: Arrays, outputs: Arrays, ranking: Ranking) -> tuple[Arrays, Arrays]:
    """Both sides with scores in the place of class indices: those that the reference gives to each choice.

    A class outside of the reference's best few has at most the score of the last of them, and gets that.

    Args:
        reference: Trusted outputs by name, `[samples, k]` of scores and of indices among them.
        outputs: Outputs to judge.
        ranking: Which of them are ranked.

    Returns:
        The same outputs where indices cannot be compared at all, for the comparison to say so.
    """
    if not _fits(reference, outputs, ranking):
        return reference, outputs
    best, scores = reference[ranking.indices], reference[ranking.scores]
    chosen = outputs[ranking.indices]
    places = chosen[..., :, np.newaxis] == best[..., np.newaxis, :]
    theirs = np.take_along_axis(scores, places.argmax(axis=-1), axis=-1)
    given = np.where(places.any(axis=-1), theirs, scores[..., -1:])
    return {**reference, ranking.indices: scores}, {**outputs, ranking.indices: given.astype(scores.dtype)}


def all_scores(scores: AnyArray, indices: AnyArray, classes: int) -> AnyArray:
    """Scores of all classes `[samples, classes]`: those that were not answered get the last that was.

    Args:
        scores: Of the best few, best first, `[samples, k]`.
        indices: Their classes.
        classes: Number of classes; more than any index.
    """
    spread = np.repeat(scores[:, -1:], classes, axis=1)
    np.put_along_axis(spread, indices.astype(np.int64), scores, axis=1)
    return spread


def _fits(reference: Arrays, outputs: Arrays, ranking: Ranking) -> bool:
    expected, found = reference[ranking.indices], outputs[ranking.indices]
    alike = expected.shape == found.shape == reference[ranking.scores].shape and expected.dtype == found.dtype
    return alike and bool(expected.size) and int(found.min()) >= 0
