"""Judges what users read from a version's outputs: detections, class maps, vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task, output_names
from graphkiln_backend.proof import detections
from graphkiln_backend.proof.class_maps import decide_pixels, pixel_controls
from graphkiln_backend.proof.detections import can_match, detection_controls, match_detections
from graphkiln_backend.proof.metrics import TaskTargets, measure
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.task_decision import TaskDecision
from graphkiln_backend.proof.vectors import decide_vectors, vector_controls

Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """What the outputs of a task say.

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
    """Compares what users read.

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
    """Why a reference of detections cannot tell a right graph from a wrong one, or empty where it can."""
    if not isinstance(task, Detection) or not can_match(task, reference, reference):
        return ""
    return detections.why_undecided(task, reference, limits)


def is_judged(task: Task | None) -> bool:
    """Whether a task has decisions of its own here."""
    return isinstance(task, Detection | Segmentation | Embedding)


def check_controls(task: Task | None, reference: Arrays, limits: Limits) -> tuple[str, ...]:
    """Changes copies of the reference so that users would see it, and makes sure that the same judgment refuses them.

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
    """Whether both hold what the task names, in the same shapes and at least one sample of it."""
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
