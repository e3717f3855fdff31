"""Whether two graphs give the same class to each pixel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.task_decision import Metric, TaskDecision

Arrays = Mapping[str, AnyArray]


def output_of(task: Segmentation) -> str:
    """The output that says the classes."""
    return task.scores or task.classes or ""


def class_map(task: Segmentation, outputs: Arrays) -> npt.NDArray[np.int64]:
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
    """Compares the classes of all pixels.

    Args:
        task: Which output says them.
        reference: Trusted outputs by name.
        outputs: Outputs to judge, of the same shapes.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes; a pixel that is decided by less is a near tie.
        metric: How good both are, where that is known.
    """
    before, after = class_map(task, reference), class_map(task, outputs)
    differ = before != after
    tied = differ & _undecided(task, reference, noise)
    return TaskDecision(
        what="pixels of the same class",
        agreeing=int(differ.size - differ.sum() + tied.sum()),
        total=int(differ.size),
        least=limits.tasks.equal_pixels,
        near_ties=int(tied.sum()),
        metric=metric,
        inconclusive=_inconclusive(before, limits),
    )


def pixel_controls(task: Segmentation, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Copies of the reference that no working check lets pass: the map moved, two classes swapped.

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


def _share(classes: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> float:
    return float(np.mean(classes == others))


def _swap(task: Segmentation, array: AnyArray, first: int, second: int) -> AnyArray:
    if task.scores:
        order = np.arange(array.shape[1])
        order[[first, second]] = second, first
        return array[:, order]
    swapped = np.where(array == second, np.array(first, array.dtype), array)
    return np.where(array == first, np.array(second, array.dtype), swapped)


def _undecided(task: Segmentation, reference: Arrays, noise: float) -> npt.NDArray[np.bool_] | np.bool_:
    """Pixels whose two best scores are no more than the noise apart; a map of classes alone tells none."""
    if not task.scores:
        return np.bool_(False)
    scores = reference[task.scores].astype(np.float64)
    if scores.shape[1] < 2:
        return np.bool_(False)
    best = np.partition(scores, -2, axis=1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0] <= noise)


def _inconclusive(classes: npt.NDArray[np.int64], limits: Limits) -> str:
    if limits.tasks.faint or len(np.unique(classes)) > 1:
        return ""
    return "every pixel has the same class; give samples and weights that decide"
