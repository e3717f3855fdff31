"""Do two sets of scores decide the same: top-1 agreement, with what it is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln.graph.dtypes import AnyArray
from graphkiln.proof.policy import Limits

_CONFIDENCE = 0.95
_DECIDED = 3.0
"""A set of samples decides something when its median margin is this many times the error that the policy allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How often the best class stayed the best.

    Attributes:
        samples: How many samples were compared.
        same: How many kept their best class; one whose margin is below the noise of fp32 counts as kept.
        lower_bound: Least share of equal decisions, with 95% confidence.
        undecided: Why agreement means nothing here, or empty.
    """

    samples: int
    same: int
    lower_bound: float
    undecided: str = ""

    def within(self, limits: Limits) -> bool:
        """Whether enough decisions are equal, or nothing was decided."""
        return bool(self.undecided) or self.same >= limits.top1_agreement * self.samples

    def __str__(self) -> str:
        if self.undecided:
            return f"same answers not judged: {self.undecided}"
        return f"{self.same}/{self.samples} same answer (>= {self.lower_bound:.1%} at 95%)"


def decide(reference: AnyArray, scores: AnyArray, limits: Limits, *, noise: float) -> Decision:
    """Compares decisions.

    Args:
        reference: Trusted scores `[samples, classes]`, two classes at least.
        scores: Scores to judge.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes, measured on the same samples.
    """
    expected = reference.astype(np.float64)
    order = np.sort(expected, axis=1)
    margin = order[:, -1] - order[:, -2]
    flipped = (scores.astype(np.float64).argmax(axis=1) != expected.argmax(axis=1)) & (margin > noise)
    samples = len(expected)
    same = samples - int(flipped.sum())
    return Decision(
        samples=samples,
        same=same,
        lower_bound=lower_bound(same, samples),
        undecided=_undecided(expected, margin, limits),
    )


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
