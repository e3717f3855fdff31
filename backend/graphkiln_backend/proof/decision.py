"""Do two sets of scores decide the same: top-1 agreement, with what it is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.proof.policy import Limits

_CONFIDENCE = 0.95
_DECIDED = 3.0
_ROUNDING = 1e-9
"""Of shares that are differences of fractions."""
"""A set of samples decides something when its median margin is this many times the error that the policy allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How often the best class stayed the best.

    Attributes:
        samples: How many samples were compared.
        same: How many kept their best class; one whose margin is below the noise of fp32 counts as kept.
        interval: Least and largest share of equal decisions, with 95% confidence.
        right: Shares of right answers, of the reference and of what is judged; None where they are not known.
        undecided: Why agreement means nothing here, or empty.
    """

    samples: int
    same: int
    interval: tuple[float, float]
    right: tuple[float, float] | None = None
    undecided: str = ""

    def within(self, limits: Limits) -> bool:
        """Whether enough decisions are equal, or as many are right as before, or nothing was decided."""
        if self.undecided or self.same >= limits.top1_agreement * self.samples:
            return True
        if self.right is None or limits.metric_drop is None:
            return False
        before, after = self.right
        return before - after <= limits.metric_drop + _ROUNDING

    def __str__(self) -> str:
        if self.undecided:
            return f"same answers not judged: {self.undecided}"
        text = f"{self.same}/{self.samples} same answer (>= {self.interval[0]:.1%} at 95%)"
        return text if self.right is None else f"{text}, {self.right[1]:.1%} right instead of {self.right[0]:.1%}"


def decide(
    reference: AnyArray,
    scores: AnyArray,
    limits: Limits,
    *,
    noise: float,
    targets: npt.NDArray[np.int64] | None = None,
) -> Decision:
    """Compares decisions.

    Args:
        reference: Trusted scores `[samples, classes]`, two classes at least.
        scores: Scores to judge.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes, measured on the same samples.
        targets: The right classes, `[samples]`, where they are known.
    """
    expected = reference.astype(np.float64)
    order = np.sort(expected, axis=1)
    margin = order[:, -1] - order[:, -2]
    best, best_before = scores.astype(np.float64).argmax(axis=1), expected.argmax(axis=1)
    flipped = (best != best_before) & (margin > noise)
    samples = len(expected)
    same = samples - int(flipped.sum())
    return Decision(
        samples=samples,
        same=same,
        interval=interval(same, samples),
        right=None if targets is None else (float(np.mean(best_before == targets)), float(np.mean(best == targets))),
        undecided=_undecided(expected, margin, limits),
    )


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Two-sided 95% confidence interval of a share. Source: Clopper and Pearson, 1934."""
    return lower_bound(successes, trials), 1 - lower_bound(trials - successes, trials)


def lower_bound(successes: int, trials: int) -> float:
    """Lower end of the two-sided 95% confidence interval of a share. Source: Clopper and Pearson, 1934."""
    if successes == 0:
        return 0.0
    tail = (1 - _CONFIDENCE) / 2
    low, high = 0.0, successes / trials
    for _ in range(60):
        middle = (low + high) / 2
        if _at_least(successes, trials, middle) < tail:
            low = middle
        else:
            high = middle
    return low


def _at_least(successes: int, trials: int, share: float) -> float:
    """Probability of that many successes or more."""
    if share <= 0:
        return 0.0
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(share)
        + (trials - k) * math.log1p(-share)
        for k in range(successes, trials + 1)
    )
    return sum(math.exp(value) for value in logs) if share < 1 else 1.0


def _undecided(expected: npt.NDArray[np.float64], margin: npt.NDArray[np.float64], limits: Limits) -> str:
    rms = math.sqrt(float(np.mean(np.square(expected))))
    needed = _DECIDED * limits.relative_l2 * rms
    found = float(np.median(margin))
    if found <= needed:
        return (
            f"half of the samples are decided by less than {found:.2g}, an allowed error can turn that; "
            "give samples and weights that decide"
        )
    if len(np.unique(expected.argmax(axis=1))) == 1 and len(expected) > 1:
        return "every sample has the same answer; give samples and weights that decide"
    return ""
