"""Numeric policy: the limits for a saved or lowered graph before it is served.

Each limit leaves room above the errors measured on trained models; none is set to an observed error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.manifest import Adoption
from graphkiln_backend.graph.precision import Precision

# Two correctly rounded computations of a value can differ by one rounding. Every row allows at least this many unit
# roundoffs between an output and its reference.
ROUNDINGS = 4.0
_ROUNDING = {DType.FP64: 2.0**-53, DType.FP32: 2.0**-24, DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}
_WORST_ROUNDINGS = 4.0  # allowed ratio of the worst element's error to the relative L2


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """Limits for task results, in addition to the numeric limits.

    Attributes:
        box_iou: Minimum IoU of the boxes, and of the masks, of a matched pair of detections.
        box_pixels: Maximum movement of a box corner or keypoint in pixels. None to use the overlap only; a keypoint may
            then move by `1 - box_iou` of the longer side of its box.
        score: Maximum score difference of a detection, as a share of the highest score on the image.
        faint: Whether the limits apply to detections below the task's score threshold, which clients discard.
        equal_pixels: Minimum share of pixels of the same class.
        cosine: Minimum cosine of a vector and its reference.
        metric_drop: With labels: maximum drop of mAP, mIoU or recall@1.
    """

    box_iou: float
    box_pixels: float | None
    score: float
    faint: bool
    equal_pixels: float
    cosine: float
    metric_drop: float = 0.01


# fp32 keeps detections within 0.1 pixels, fp16 within one: its spacing is half a pixel at a coordinate of 1,000.
# bf16 and int8 move boxes, which costs a mAP over IoU 0.5 to 0.95 only its strictest steps. An error of e of the signal
# gives a cosine of 1 - e^2 / 2, so these limits follow the relative L2. Pixels at the border of two classes flip, so
# the allowed share is about that of object borders.
FP32_TASKS = TaskLimits(box_iou=0.99, box_pixels=0.1, score=1e-3, faint=True, equal_pixels=0.9999, cosine=1 - 1e-8)
FP16_TASKS = TaskLimits(box_iou=0.99, box_pixels=0.9, score=2e-2, faint=True, equal_pixels=0.995, cosine=1 - 1e-4)
BF16_TASKS = TaskLimits(box_iou=0.9, box_pixels=None, score=1e-1, faint=False, equal_pixels=0.98, cosine=0.995)
INT8_TASKS = TaskLimits(box_iou=0.75, box_pixels=None, score=3e-1, faint=False, equal_pixels=0.95, cosine=0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """One row of the policy.

    Attributes:
        name: Change between the reference and the graph; the `step` of a manifest.
        relative_l2: Maximum of `|y - r| / |r|`.
        worst_element: Maximum of `max |y - r| / (|r| + RMS(r))`; None for no limit.
        top1_agreement: Minimum share of equal decisions, on conclusive samples.
        metric_drop: With labels: maximum drop of the accuracy, which then replaces the agreement. None if the agreement
            always counts.
        tasks: Limits for detections, segmentations and embeddings.
    """

    name: str
    relative_l2: float
    worst_element: float | None
    top1_agreement: float
    metric_drop: float | None = None
    tasks: TaskLimits = FP32_TASKS

    def at_least(self, relative_l2: float) -> Limits:
        """Return this row, loosened if it is tighter than the precision of an output's dtype."""
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

GRADIENT_FACTOR = 5.0  # limits of gradients relative to the row of their precision
NOISE_FACTOR = 2.0  # allowed error of an export against fp64, relative to the error of its source

# A session compared with the saved graph's own golden outputs: tight even for graphs of low precision.
REPLAY: dict[Precision, Limits] = {
    Precision.FP32: OTHER_ENGINE,
    Precision.FP16: replace(FP16, name="replay-fp16"),
    Precision.BF16: replace(BF16, name="replay-bf16", relative_l2=5e-2),
    Precision.INT8: replace(INT8, name="replay-int8", relative_l2=5e-2),
}


def adopted_limits(adoption: Adoption) -> Limits:
    """Return the row for the golden samples of a graph that another tool wrote.

    Outputs that were recorded from the graph itself get the tight replay row.
    """
    return REPLAY[adoption.precision] if adoption.recorded else beside_reference(adoption.precision)


def rounding_of(dtype: DType) -> float:
    """Return the unit roundoff of a floating-point dtype, or 0 for other dtypes."""
    return _ROUNDING.get(dtype, 0.0)


def export_limits(precision: Precision, depth: int) -> Limits:
    """Return the row for an export of a source that computes in 16 bits.

    Both round the result of each node. Independent rounding errors grow with the square root of the number of
    successive nodes; the precision's own row is the upper bound.

    Args:
        precision: Precision of the source.
        depth: Length of the longest chain of nodes that round to it.

    Source: N. J. Higham and T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    if not precision.is_half:
        return EXPORT
    row, error = BY_PRECISION[precision], ROUNDINGS * rounding_of(precision.dtype) * math.sqrt(max(1, depth))
    worst = row.worst_element and min(row.worst_element, _WORST_ROUNDINGS * error)
    return replace(row, name=f"export {precision}", relative_l2=min(row.relative_l2, error), worst_element=worst)


def beside_reference(precision: Precision) -> Limits:
    """Return the row for outputs of another engine or tool beside those of a reference model.

    Args:
        precision: Precision that the graph is meant to compute in.
    """
    row = OTHER_ENGINE if precision is Precision.FP32 else BY_PRECISION[precision]
    return replace(row, name=f"adopted {precision}")


def limits_beside_fp64(limits: Limits, source_error: float) -> Limits | None:
    """Return the row of an export compared with its source in fp64, or None if fp64 cannot help.

    Two fp32 computations differ by more than the row if rounding errors grow in the source itself (many layers,
    untrained weights). fp64 shows which of them is wrong: the export may be only slightly further from it than the
    source's own fp32, and both must stay within the limit of another engine.

    Args:
        limits: Row for the comparison with the source in fp32.
        source_error: Relative L2 between the source in fp32 and in fp64.
    """
    allowed = NOISE_FACTOR * source_error
    if not limits.relative_l2 < allowed <= OTHER_ENGINE.relative_l2:
        return None
    return replace(
        limits,
        name=f"{limits.name} beside fp64, from which its own fp32 is {source_error:.1e} off",
        relative_l2=allowed,
    )


def fp64_can_decide(relative_l2: float) -> bool:
    """Return true if a comparison with fp64 can accept an export with this error against its source in fp32.

    Both must be within the limit of another engine. If they are further apart, the comparison, which takes minutes for
    a large model, cannot succeed.
    """
    return relative_l2 <= 2 * OTHER_ENGINE.relative_l2


def gradient_limits(limits: Limits, noise: float) -> Limits:
    """Return the row for gradients: five times that of the outputs.

    Args:
        limits: Row of the precision.
        noise: Change of the gradient by fp32 itself, relative L2. If it exceeds the row, the limit is five times the
            noise.
    """
    name, relative_l2 = f"{limits.name} gradient", limits.relative_l2 * GRADIENT_FACTOR
    if noise > limits.relative_l2:
        name += f" (which the noise of fp32 changes by {noise:.1e})"
        return replace(limits, name=name, relative_l2=max(relative_l2, GRADIENT_FACTOR * noise), worst_element=None)
    worst = limits.worst_element and limits.worst_element * GRADIENT_FACTOR
    return replace(limits, name=name, relative_l2=relative_l2, worst_element=worst)
