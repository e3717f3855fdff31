"""The best classes of a score tensor, with a defined order of ties, NaN and infinities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")


def top_k(scores: AnyArray, k: int) -> tuple[npt.NDArray[np.int64], AnyArray]:
    """The `k` best classes along the last axis, best first.

    Order: higher scores first, then the lower index; NaN comes after everything, `-inf` included.

    Args:
        scores: `[..., classes]`, of any type that has an order: floats, integers, booleans.
        k: How many; at most all classes are returned.

    Returns:
        Indices and scores, both `[..., min(k, classes)]`; scores in the dtype of the input.

    Raises:
        InvalidInput: The tensor holds strings, has no axis, or `k` is less than 1.
    """
    if k < 1:
        raise InvalidInput(f"top_k must be at least 1, got {k}")
    if scores.ndim < 1 or scores.dtype.kind in "OSU":
        raise InvalidInput(f"{scores.dtype}{list(scores.shape)} cannot be ranked", hint="read the output with infer()")
    keys = _sort_keys(scores)
    order = _best_first(keys, min(k, scores.shape[-1]))
    return order, np.take_along_axis(scores, order, axis=-1)


def softmax(scores: AnyArray) -> npt.NDArray[np.float64]:
    """Probabilities along the last axis.

    `-inf` becomes 0; where a score is NaN, or all are `-inf`, or one is `+inf`, there is no distribution: NaN.

    Args:
        scores: `[..., classes]`, numbers.
    """
    wide = scores.astype(np.float64)
    with np.errstate(invalid="ignore"):
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return result


def _sort_keys(scores: AnyArray) -> AnyArray:
    """Keys whose ascending order is best first. Negated numbers would overflow for the least integer."""
    if scores.dtype.kind in "iub":
        return np.invert(scores)  # ~x = -x - 1, and reverses unsigned numbers and booleans, too
    wide = scores if scores.dtype.itemsize >= np.dtype(np.float32).itemsize else scores.astype(np.float32)
    return np.negative(wide)  # NaN stays NaN, and numpy sorts it last


def _best_first(keys: AnyArray, k: int) -> npt.NDArray[np.int64]:
    """Indices of the `k` least keys, stable.

    A partition finds the k-th key, then only candidates up to it are sorted: 21,000 classes cost 0.1 ms instead of 1.
    """
    classes = keys.shape[-1]
    if k >= classes or keys.size != classes:
        return np.argsort(keys, axis=-1, kind="stable")[..., :k]
    flat = keys.reshape(-1)
    worst = np.partition(flat, k - 1)[k - 1]
    candidates = np.flatnonzero(flat <= worst) if worst == worst else np.arange(classes)  # noqa: PLR0124 - NaN
    best: npt.NDArray[np.int64] = candidates[np.argsort(flat[candidates], kind="stable")[:k]]
    return best.reshape(*keys.shape[:-1], k)
