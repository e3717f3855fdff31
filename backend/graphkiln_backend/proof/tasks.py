"""Judgment of the results that users read from outputs: detections, class maps, vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task, output_names
from graphkiln_backend.proof import detections
from graphkiln_backend.proof.class_maps import decide_pixels, pixel_controls
from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.detections import can_match, detection_controls, match_detections
from graphkiln_backend.proof.metrics import TaskTargets, measure
from graphkiln_backend.proof.policy import Limits

# Whether two graphs embed the same samples alike: by the cosine of each vector with its reference.

_CONTROL_SCALE = 3.0  # A control is turned by this many times the angle that the row allows


def cosines(vectors: AnyArray, others: AnyArray) -> npt.NDArray[np.float64]:
    """Compute the cosines of vectors of the same row, `[samples]`; 1 for two that are zero, 0 for one."""
    left, right = vectors.astype(np.float64), others.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    alike = np.all(left == right, axis=1).astype(np.float64)
    return np.asarray(np.divide(np.sum(left * right, axis=1), lengths, out=alike, where=lengths > 0))


def decide_vectors(
    task: Embedding, reference: Arrays, outputs: Arrays, limits: Limits, metric: Metric | None = None
) -> TaskDecision:
    """Compare the directions of vectors by sample: the error of a batch hides a single vector that turned.

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


Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """Decision on the outputs of a task.

    Attributes:
        outputs: Those to judge, in the order of the reference: for the comparison of numbers.
        decisions: One, or none where the outputs cannot be read at all: the comparison of numbers says why.
    """

    outputs: Arrays
    decisions: tuple[TaskDecision, ...] = ()


def judge(
    task: Task | None,
    reference: Arrays,
    outputs: Arrays,
    limits: Limits,
    *,
    noise: float = 0.0,
    targets: TaskTargets | None = None,
) -> Judgment:
    """Compare the results that users read.

    Args:
        task: What the version answers; None, and a classification, are judged elsewhere.
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes.
        targets: What is on the images, where it is known.
    """
    if not is_judged(task) or not _readable(task, reference, outputs):
        return Judgment(outputs=outputs)
    metric = measure(task, reference, outputs, targets) if targets is not None else None
    if isinstance(task, Detection):
        aligned, decision = match_detections(task, reference, outputs, limits, metric)
        return Judgment(outputs=aligned, decisions=(decision,))
    if isinstance(task, Segmentation):
        return Judgment(
            outputs=_settle_pixels(task, reference, outputs),
            decisions=(decide_pixels(task, reference, outputs, limits, noise=noise, metric=metric),),
        )
    if isinstance(task, Embedding):
        return Judgment(outputs=outputs, decisions=(decide_vectors(task, reference, outputs, limits, metric),))
    return Judgment(outputs=outputs)


def why_undecided(task: Task | None, reference: Arrays, limits: Limits) -> str:
    """Explain why a reference of detections cannot tell a right graph from a wrong one; empty where it can."""
    if not isinstance(task, Detection) or not can_match(task, reference, reference):
        return ""
    return detections.why_undecided(task, reference, limits)


def is_judged(task: Task | None) -> bool:
    """Return true for a task whose results are judged here."""
    return isinstance(task, Detection | Segmentation | Embedding)


def check_controls(task: Task | None, reference: Arrays, limits: Limits) -> tuple[str, ...]:
    """Change copies of the reference visibly, and require that the same judgment refuses them.

    Returns:
        What was done to each; none where the samples hold nothing that could be changed.

    Raises:
        VerificationError: A changed copy passed.
    """
    controls = list(_controls(task, reference, limits))
    passed = [change for change, changed in controls if _passes(task, reference, changed, limits)]
    if passed:
        raise VerificationError(
            "the check cannot tell a changed copy from the reference",
            report=f"negative control passed: {', '.join(passed)}",
            hint="report this: the comparison is broken",
        )
    return tuple(change for change, _ in controls)


def _passes(task: Task | None, reference: Arrays, changed: Arrays, limits: Limits) -> bool:
    decisions = judge(task, reference, changed, limits).decisions
    return all(decision.within(limits) for decision in decisions)


def _controls(task: Task | None, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    if not is_judged(task) or not _readable(task, reference, reference):
        return
    if isinstance(task, Detection):
        yield from detection_controls(task, reference, limits)
    elif isinstance(task, Segmentation):
        yield from pixel_controls(task, reference, limits)
    elif isinstance(task, Embedding):
        yield from vector_controls(task, reference, limits)


def _readable(task: Task | None, reference: Arrays, outputs: Arrays) -> bool:
    """Return true where both hold the outputs that the task names, in the same shapes, and at least one sample."""
    if task is None:
        return False
    if isinstance(task, Detection):
        return can_match(task, reference, outputs)
    names = output_names(task)
    return all(name in reference and name in outputs for name in names) and all(
        reference[name].shape == outputs[name].shape and reference[name].size for name in names
    )


def _settle_pixels(task: Segmentation, reference: Arrays, outputs: Arrays) -> Arrays:
    """For the numbers, a map of classes is the reference: how many of its pixels differ is what the decision says."""
    return {**outputs, task.classes: reference[task.classes]} if task.classes else outputs
