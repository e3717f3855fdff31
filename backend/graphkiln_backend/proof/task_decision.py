"""What a proof says of a task: how much of what was detected, segmented or embedded stayed the same."""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln_backend.proof.decision import confidence_interval
from graphkiln_backend.proof.policy import Limits

_ROUNDING = 1e-9
"""Of a difference of two shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What labeled samples say of the reference, and of what is judged.

    Attributes:
        name: mAP, mIoU, recall@1.
        before: Of the reference, 0..1.
        after: Of what is judged.
    """

    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name} {self.after:.2%} instead of {self.before:.2%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDecision:
    """How much of what users read stayed the same.

    Attributes:
        what: What was counted, and by which rule.
        agreeing: How many are the same.
        total: How many were compared.
        least: Share of them that must agree.
        detail: A figure beside it, or empty.
        near_ties: How many of those that differ are decided by less than the limits can tell; they count as the same.
        metric: With labels: how good both are.
        inconclusive: Why agreement means nothing on these samples, or empty.
    """

    what: str
    agreeing: int
    total: int
    least: float
    detail: str = ""
    near_ties: int = 0
    metric: Metric | None = None
    inconclusive: str = ""

    def within(self, limits: Limits) -> bool:
        """Whether enough of them agree and no metric fell; where labels may decide, one that can fall does alone."""
        if self.metric:
            if self.metric.before - self.metric.after > limits.tasks.metric_drop + _ROUNDING:
                return False
            if limits.metric_drop is not None and self.metric.before > limits.tasks.metric_drop:
                return True
        if self.inconclusive:
            return True
        return self.agreeing >= self.least * self.total - _ROUNDING

    def __str__(self) -> str:
        metric = f", {self.metric}" if self.metric else ""
        if self.inconclusive:
            return f"{self.what} not judged: {self.inconclusive}{metric}"
        lowest, _ = confidence_interval(self.agreeing, self.total) if self.total < _EXACT_UNTIL else (None, None)
        bound = "" if lowest is None else f" (>= {lowest:.1%} at 95%)"
        ties = f", {self.near_ties} near ties" if self.near_ties else ""
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.what}: {self.agreeing}/{self.total}{bound}{ties}{detail}{metric}"


_EXACT_UNTIL = 10_000
"""Of more, the share itself is as good as its bound; pixels are not independent anyway."""
