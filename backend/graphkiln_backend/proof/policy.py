"""The limits that a saved or lowered graph is held to before it is served.

Source: the project's numeric policy; each limit leaves room above what was measured on trained models, and none is set
to whatever error was observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.precision import Precision

# Two computations of one value, each rounded once, are a rounding apart where they fall on two sides of its middle; an
# output may be this many unit roundoffs from its reference, whatever the row.
ROUNDINGS = 4.0
_ROUNDING = {DType.FP64: 2.0**-53, DType.FP32: 2.0**-24, DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}
_WORST_ROUNDINGS = 4.0  # A single element may be this many times as far off as all of them together


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """Limits of the results that users read from the outputs of a task, beside those of the numbers.

    Attributes:
        box_iou: Two detections are the same one from this intersection over union of their boxes, and of their masks.
        box_pixels: Most that a corner of the box, or a keypoint, may move; None where only the overlap counts, and a
            keypoint may move by what is missing from box_iou to 1, as a share of the longer side of the box.
        score: Most that the score of a detection may differ, as a share of the highest one on the image.
        faint: Whether detections below the task's score threshold, which clients leave out, are held to it, too.
        equal_pixels: Least share of pixels of the same class.
        cosine: Least cosine of a vector and its reference.
        metric_drop: With labels: most that mAP, mIoU or recall@1 may fall.
    """

    box_iou: float
    box_pixels: float | None
    score: float
    faint: bool
    equal_pixels: float
    cosine: float
    metric_drop: float = 0.01


# In fp32 a detection stays the same within a tenth of a pixel, which no person sees; in fp16, whose numbers are half a
# pixel apart at a coordinate of 1,000, within less than one. bf16 and int8 move boxes: a mAP over IoU 0.5 to 0.95 loses
# its strictest steps only. A cosine is 1 - e^2 / 2 where the error is e of the signal: rows follow their relative L2.
# Pixels on the border of two classes turn where scores are nearly equal: about as many as are on borders of objects.
FP32_TASKS = TaskLimits(box_iou=0.99, box_pixels=0.1, score=1e-3, faint=True, equal_pixels=0.9999, cosine=1 - 1e-8)
FP16_TASKS = TaskLimits(box_iou=0.99, box_pixels=0.9, score=2e-2, faint=True, equal_pixels=0.995, cosine=1 - 1e-4)
BF16_TASKS = TaskLimits(box_iou=0.9, box_pixels=None, score=1e-1, faint=False, equal_pixels=0.98, cosine=0.995)
INT8_TASKS = TaskLimits(box_iou=0.75, box_pixels=None, score=3e-1, faint=False, equal_pixels=0.95, cosine=0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """One row of the policy.

    Attributes:
        name: What changed between the reference and the graph; a manifest records it as `step`.
        relative_l2: Most that `|y - r| / |r|` may be.
        worst_element: Most that `max |y - r| / (|r| + RMS(r))` may be; None for no limit.
        top1_agreement: Least share of equal decisions, on decisive samples.
        metric_drop: Where the true classes are known: most that the accuracy may fall, which then counts instead of the
            agreement. None where agreement always counts.
        tasks: Limits of what is detected, segmented and embedded.
    """

    name: str
    relative_l2: float
    worst_element: float | None
    top1_agreement: float
    metric_drop: float | None = None
    tasks: TaskLimits = FP32_TASKS

    def at_least(self, relative_l2: float) -> Limits:
        """Return this row, or a looser one where it is tighter than the precision of an output's type."""
        if relative_l2 <= self.relative_l2:
            return self
        worst = self.worst_element and max(self.worst_element, _WORST_ROUNDINGS * relative_l2)
        return replace(self, relative_l2=relative_l2, worst_element=worst)


EXPORT = Limits(name="export", relative_l2=1e-5, worst_element=1e-3, top1_agreement=1.0)
OTHER_ENGINE = Limits(name="other-engine", relative_l2=1e-4, worst_element=1e-2, top1_agreement=1.0)
FP16 = Limits(name="fp16", relative_l2=1e-2, worst_element=5e-2, top1_agreement=0.995, tasks=FP16_TASKS)
BF16 = Limits(name="bf16", relative_l2=1e-1, worst_element=3e-1, top1_agreement=0.99, tasks=BF16_TASKS)
INT8 = Limits(
    name="int8", relative_l2=3e-1, worst_element=None, top1_agreement=0.98, metric_drop=0.01, tasks=INT8_TASKS
)

# A saved graph beside its source model in fp32.
BY_PRECISION: dict[Precision, Limits] = {
    Precision.FP32: EXPORT,
    Precision.FP16: FP16,
    Precision.BF16: BF16,
    Precision.INT8: INT8,
}

GRADIENT_FACTOR = 5.0  # gradients may be off by this many times the row of their precision

NOISE_FACTOR = 2.0  # beside fp64, an export may be off by this many times what its source is off

# A session beside the saved graph's own golden outputs: tight even where the graph itself is coarse.
REPLAY: dict[Precision, Limits] = {
    Precision.FP32: OTHER_ENGINE,
    Precision.FP16: replace(FP16, name="replay-fp16"),
    Precision.BF16: replace(BF16, name="replay-bf16", relative_l2=5e-2),
    Precision.INT8: replace(INT8, name="replay-int8", relative_l2=5e-2),
}


def rounding_of(dtype: DType) -> float:
    """The unit roundoff of a floating-point type: the largest relative error of rounding to it; 0 for other types."""
    return _ROUNDING.get(dtype, 0.0)


def export_limits(precision: Precision, depth: int) -> Limits:
    """The row of a saved graph beside its source, where the source itself computes in 16 bits.

    Both round what each node computes. Independent roundings add up as their root mean square: by the root of the
    number of nodes in a row, and never to more than the precision's own row allows.

    Args:
        precision: What the source computes in.
        depth: Most nodes in a row that round to it.

    Source: N. J. Higham and T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    if not precision.is_half:
        return EXPORT
    row, error = BY_PRECISION[precision], ROUNDINGS * rounding_of(precision.dtype) * math.sqrt(max(1, depth))
    worst = row.worst_element and min(row.worst_element, _WORST_ROUNDINGS * error)
    return replace(row, name=f"export {precision}", relative_l2=min(row.relative_l2, error), worst_element=worst)


def limits_beside_fp64(limits: Limits, source_error: float) -> Limits | None:
    """The row of an export whose reference is its source computed in fp64; None where fp32 means little for the source.

    Two computations in fp32 differ by more than the row allows where the source's own roundings grow (many layers,
    weights that nobody trained). Which of them is off, fp64 tells: the export may be little further from it than the
    source's own fp32, and both must stay within what another engine may be off.

    Args:
        limits: The row beside the source in fp32.
        source_error: How far the source's own fp32 is from its fp64, relative L2.
    """
    allowed = NOISE_FACTOR * source_error
    if not limits.relative_l2 < allowed <= OTHER_ENGINE.relative_l2:
        return None
    return replace(
        limits,
        name=f"{limits.name} beside fp64, from which its own fp32 is {source_error:.1e} off",
        relative_l2=allowed,
    )


def fp64_may_tell(relative_l2: float) -> bool:
    """Return true where fp64 may find an export right that is that far from its source in fp32.

    Each of them may be off by what another engine may be off, and no more: two that are further apart are not both near
    fp64, and computing it takes minutes for a large model.
    """
    return relative_l2 <= 2 * OTHER_ENGINE.relative_l2


def gradient_limits(limits: Limits, noise: float) -> Limits:
    """The row for gradients: five times that of the outputs.

    Args:
        limits: The row of the precision.
        noise: How much fp32 itself changes the gradient, as a share of its length. Where that is more than the row
            allows, five times the noise is the limit.
    """
    name, relative_l2 = f"{limits.name} gradient", limits.relative_l2 * GRADIENT_FACTOR
    if noise > limits.relative_l2:
        name += f" (which the noise of fp32 changes by {noise:.1e})"
        return replace(limits, name=name, relative_l2=max(relative_l2, GRADIENT_FACTOR * noise), worst_element=None)
    worst = limits.worst_element and limits.worst_element * GRADIENT_FACTOR
    return replace(limits, name=name, relative_l2=relative_l2, worst_element=worst)
