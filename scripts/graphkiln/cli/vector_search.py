"""Exact search: the vectors of which the angle to another one is the smallest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import InvalidInput

Chunk: TypeAlias = "tuple[Sequence[str], npt.NDArray[np.float32]]"
"""Sources, and their vectors `[sources, features]`."""


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A vector that was found.

    Attributes:
        source: The image that it is of.
        score: Cosine of the angle to the query, from -1 to 1.
    """

    source: str
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        neighbors: The nearest first; of equals, the first in the file.
        rows: How many vectors were looked at.
        skipped: How many of them have no angle: their length is 0, or an element is not finite.
    """

    neighbors: tuple[Neighbor, ...]
    rows: int
    skipped: int


def search(chunks: Iterable[Chunk], query: npt.NDArray[np.float32], top: int) -> Found:
    """Looks at every vector, and keeps the best.

    Args:
        chunks: The vectors, as many at a time as may be in memory.
        query: `[features]`.
        top: How many neighbors, at most.

    Raises:
        InvalidInput: The query has no angle.
    """
    unit = _unit(query)
    best: list[Neighbor] = []
    rows = skipped = 0
    for sources, vectors in chunks:
        scores = _cosines(vectors, unit)
        rows, skipped = rows + len(scores), skipped + int(np.isnan(scores).sum())
        order = np.argsort(-scores, kind="stable")[:top]  # NaN comes last
        found = [Neighbor(sources[row], float(scores[row])) for row in order if not np.isnan(scores[row])]
        best = sorted([*best, *found], key=lambda each: -each.score)[:top]  # stable: earlier chunks first
    return Found(tuple(best), rows, skipped)


def _unit(query: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    length = _lengths(wide := query.astype(np.float64))
    if not 0 < length < np.inf:
        raise InvalidInput("the vector of the image has no direction: its length is 0 or not finite")
    return wide / length


def _cosines(vectors: npt.NDArray[np.float32], unit: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Cosines `[rows]`; NaN where a vector has no direction.

    In float64, each row summed alone and in one order: a matrix product may round equal rows differently, by where they
    stand, and equals would not stay in the order of the file.
    """
    wide = vectors.astype(np.float64)
    with np.errstate(all="ignore"):
        cosines = (wide * unit).sum(axis=1) / _lengths(wide)
    return np.where(np.isfinite(cosines), np.clip(cosines, -1, 1), np.nan)


def _lengths(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.sqrt(np.square(vectors).sum(axis=-1)))
