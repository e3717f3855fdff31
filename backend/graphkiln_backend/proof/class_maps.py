"""Agreement of two graphs on the class of each pixel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.policy import OTHER_ENGINE, Limits

Arrays = Mapping[str, AnyArray]
_Classes = npt.NDArray[np.int64]


def output_of(task: Segmentation) -> str:
    """The output that says the classes."""
    return task.scores or task.classes or ""


def class_map(task: Segmentation, outputs: Arrays) -> _Classes:
    """The class of each pixel, `[samples, height, width]`."""
    array = outputs[output_of(task)]
    return np.asarray(array.argmax(axis=1) if task.scores else array, np.int64)


def decide_pixels(
    task: Segmentation,
    reference: Arrays,
    outputs: Arrays,
    limits: Limits,
    *,
    noise: float,
    metric: Metric | None = None,
) -> TaskDecision:
    """Compare the classes of all pixels.

    A pixel that differs is a near tie where the reference scores its two classes no further apart than the noise is:
    that of fp32 where it is given, or what fp32 was seen to change here, as far as the row lets the numbers differ.

    Args:
        task: Which output says them.
        reference: Trusted outputs by name.
        outputs: Outputs to judge, of the same shapes.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes, where it was measured.
        metric: How good both are, where that is known.
    """
    before, after = class_map(task, reference), class_map(task, outputs)
    margins = _margins(task, reference, before != after, after)
    noise = max(noise, _observed_noise(task, reference, outputs, limits) if margins.size else 0.0)
    tied = margins[margins <= noise]
    return TaskDecision(
        what="pixels of the same class",
        agreeing=int(before.size - margins.size + tied.size),
        total=int(before.size),
        least=limits.tasks.equal_pixels,
        detail=f"which a difference of {tied.max():.2g} decides" if tied.size else "",
        near_ties=int(tied.size),
        metric=metric,
        inconclusive=_inconclusive(before, limits),
    )


def pixel_controls(task: Segmentation, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Make copies of the reference that a working check refuses: the map moved, two classes swapped.

    The map moves by a pixel, or as far as it takes to change more pixels than the row allows.
    """
    name, classes = output_of(task), class_map(task, reference)
    if len(np.unique(classes)) < 2:
        return
    array, pixels = reference[name], 1
    while (
        pixels < classes.shape[-1] and _share(classes, np.roll(classes, pixels, axis=-1)) >= limits.tasks.equal_pixels
    ):
        pixels *= 2
    if pixels < classes.shape[-1]:
        yield f"the map moved by {pixels} pixels", {**reference, name: np.roll(array, pixels, axis=-1)}
    first, second = np.unique(classes)[np.argsort(-np.unique(classes, return_counts=True)[1])][:2]
    yield "two classes swapped", {**reference, name: _swap(task, array, int(first), int(second))}


def _share(classes: _Classes, others: _Classes) -> float:
    return float(np.mean(classes == others))


def _swap(task: Segmentation, array: AnyArray, first: int, second: int) -> AnyArray:
    if task.scores:
        order = np.arange(array.shape[1])
        order[[first, second]] = second, first
        return array[:, order]
    swapped = np.where(array == second, np.array(first, array.dtype), array)
    return np.where(array == first, np.array(second, array.dtype), swapped)


def _margins(
    task: Segmentation, reference: Arrays, differ: npt.NDArray[np.bool_], after: _Classes
) -> npt.NDArray[np.float64]:
    """Return the margin of the reference's own class over the other one, for each pixel that differs.

    A map of classes alone does not tell: as far as can be.
    """
    if not task.scores:
        return np.full(int(differ.sum()), np.inf)
    scores = np.moveaxis(reference[task.scores], 1, -1)[differ].astype(np.float64)
    chosen = np.take_along_axis(scores, after[differ][:, np.newaxis], axis=-1)
    with np.errstate(invalid="ignore"):  # of two that are infinite; no number decides nothing
        return np.asarray(scores.max(axis=-1, initial=-np.inf) - chosen[:, 0])


def _observed_noise(task: Segmentation, reference: Arrays, outputs: Arrays, limits: Limits) -> float:
    """The largest difference of a score, and no more of it than a row of fp32 allows of the signal.

    A fault may make any difference, which then would excuse what it does: what numbers may be off is the bound. Rows of
    lower precisions have none of it: their share of equal pixels leaves room for ties.
    """
    if not task.scores or limits.relative_l2 > OTHER_ENGINE.relative_l2:
        return 0.0
    pairs = zip(reference[task.scores], outputs[task.scores], strict=True)
    measured = [_measure(expected, found) for expected, found in pairs]
    signal = math.sqrt(sum(square for _, square in measured) / len(measured))
    return min(max(largest for largest, _ in measured), limits.relative_l2 * signal)


def _measure(expected: AnyArray, found: AnyArray) -> tuple[float, float]:
    """The largest difference of one sample's scores, and the mean of their squares; of what is finite in both."""
    exact = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - exact)
    finite = np.isfinite(difference)
    mean = float(np.mean(np.square(exact), where=finite)) if finite.any() else 0.0
    return float(np.max(difference, initial=0.0, where=finite)), mean


def _inconclusive(classes: _Classes, limits: Limits) -> str:
    if limits.tasks.faint or len(np.unique(classes)) > 1:
        return ""
    return "every pixel has the same class; give samples and weights that decide"
