"""The limits that a saved or lowered graph is held to before it is served.

Source: the project's numeric policy; each limit leaves room above what was measured on trained models, and none is set
to whatever error was observed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphkiln_backend.graph.precision import Precision


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
    """

    name: str
    relative_l2: float
    worst_element: float | None
    top1_agreement: float
    metric_drop: float | None = None


EXPORT = Limits(name="export", relative_l2=1e-5, worst_element=1e-3, top1_agreement=1.0)
OTHER_ENGINE = Limits(name="other-engine", relative_l2=1e-4, worst_element=1e-2, top1_agreement=1.0)
FP16 = Limits(name="fp16", relative_l2=1e-2, worst_element=5e-2, top1_agreement=0.995)
BF16 = Limits(name="bf16", relative_l2=1e-1, worst_element=3e-1, top1_agreement=0.99)
INT8 = Limits(name="int8", relative_l2=3e-1, worst_element=None, top1_agreement=0.98, metric_drop=0.01)

BY_PRECISION: dict[Precision, Limits] = {
    Precision.FP32: EXPORT,
    Precision.FP16: FP16,
    Precision.BF16: BF16,
    Precision.INT8: INT8,
}
"""A saved graph beside its source model in fp32."""

GRADIENT_FACTOR = 5.0
"""Gradients may be off by this many times the row of their precision."""

REPLAY: dict[Precision, Limits] = {
    Precision.FP32: OTHER_ENGINE,
    Precision.FP16: replace(FP16, name="replay-fp16"),
    Precision.BF16: replace(BF16, name="replay-bf16", relative_l2=5e-2),
    Precision.INT8: replace(INT8, name="replay-int8", relative_l2=5e-2),
}
"""A session beside the saved graph's own golden outputs: tight even where the graph itself is coarse."""


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
