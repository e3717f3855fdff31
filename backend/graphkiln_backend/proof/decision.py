"""Agreement of two sets of scores: top-1 agreement, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.ranks import scatter_scores

# Whether two rankings of classes are equally good: an embedded top-k, judged by the scores of its classes.
#
# Two graphs that differ by rounding order near ties differently. A class in another place is as wrong as its score is
# far from the one that belongs there.


# What a proof says of a task: how much of what was detected, segmented or embedded stayed the same.

"""Of a difference of two shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric on labeled samples, of the reference and of the judged graph.

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
    """Agreement of two graphs on the results that users read.

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
        """Return true where enough agree and no metric fell; where labels may decide, the metric alone decides."""
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


_EXACT_UNTIL = 10_000  # of more, the share itself is as good as its bound; pixels are not independent anyway


_CONFIDENCE = 0.95
# Samples are conclusive when their median margin is this many times the error that the policy allows.
_CONCLUSIVE = 3.0
_ROUNDING = 1e-9  # of a difference of two shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Agreement of two graphs on the top-1 class.

    Attributes:
        samples: How many samples were compared.
        agreeing: How many kept their top-1 class; one whose margin is below the noise of fp32 counts as kept.
        interval: Least and largest share of agreeing samples, with 95% confidence.
        accuracy: Of the reference and of what is judged; None where the true classes are not known.
        inconclusive: Why agreement means nothing on these samples, or empty.
    """

    samples: int
    agreeing: int
    interval: tuple[float, float]
    accuracy: tuple[float, float] | None = None
    inconclusive: str = ""

    def within(self, limits: Limits) -> bool:
        """Return true where enough samples agree, an accuracy that could fall did not, or samples are inconclusive."""
        if self.inconclusive or self.agreeing >= limits.top1_agreement * self.samples:
            return True
        if self.accuracy is None or limits.metric_drop is None:
            return False
        before, after = self.accuracy
        return before > limits.metric_drop and before - after <= limits.metric_drop + _ROUNDING

    def __str__(self) -> str:
        if self.inconclusive:
            return f"top-1 agreement not judged: {self.inconclusive}"
        text = f"top-1 agreement {self.agreeing}/{self.samples} (>= {self.interval[0]:.1%} at 95%)"
        if self.accuracy is None:
            return text
        before, after = self.accuracy
        return f"{text}, accuracy {after:.1%} instead of {before:.1%}"


def decide_outputs(
    reference: Mapping[str, AnyArray],
    outputs: Mapping[str, AnyArray],
    limits: Limits,
    *,
    noise: float,
    targets: npt.NDArray[np.int64] | None,
    ranking: Ranking | None,
) -> list[Decision]:
    """A decision for each score output (floating-point, `[samples, classes]`); a ranked one counts for all classes.

    Args:
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Row of the policy.
        noise: As for `decide`.
        targets: As for `decide`.
        ranking: Which outputs the graph ranks, or None.
    """
    if ranking and reference[ranking.scores].ndim == 2:
        classes = 1 + max(int(arrays[ranking.indices].max()) for arrays in (reference, outputs))
        reference, outputs = (
            {**arrays, ranking.scores: scatter_scores(arrays[ranking.scores], arrays[ranking.indices], classes)}
            for arrays in (reference, outputs)
        )
    return [
        decide(array, outputs[name], limits, noise=noise, targets=targets)
        for name, array in reference.items()
        if name in outputs and _are_scores(array)
    ]


def _are_scores(array: AnyArray) -> bool:
    return array.ndim == 2 and array.shape[1] > 1 and DType.from_numpy(array.dtype).is_float


def decide(
    reference: AnyArray,
    scores: AnyArray,
    limits: Limits,
    *,
    noise: float,
    targets: npt.NDArray[np.int64] | None = None,
) -> Decision:
    """Compare the top-1 classes of two sets of scores.

    Args:
        reference: Trusted scores `[samples, classes]`, two classes at least.
        scores: Scores to judge.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes, measured on the same samples.
        targets: The true classes, `[samples]`, where they are known.
    """
    expected = reference.astype(np.float64)
    top2 = np.sort(expected, axis=1)[:, -2:]
    margin = top2[:, 1] - top2[:, 0]
    before, after = expected.argmax(axis=1), scores.astype(np.float64).argmax(axis=1)
    flipped = (after != before) & (margin > noise)
    samples = len(expected)
    agreeing = samples - int(flipped.sum())
    return Decision(
        samples=samples,
        agreeing=agreeing,
        interval=confidence_interval(agreeing, samples),
        accuracy=None if targets is None else (float(np.mean(before == targets)), float(np.mean(after == targets))),
        inconclusive=_inconclusive(expected, margin, limits),
    )


def confidence_interval(successes: int, trials: int) -> tuple[float, float]:
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
        if _survival(successes, trials, middle) < tail:
            low = middle
        else:
            high = middle
    return low


def _survival(successes: int, trials: int, share: float) -> float:
    """Probability of that many successes or more, of a binomial distribution."""
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


def _inconclusive(expected: npt.NDArray[np.float64], margin: npt.NDArray[np.float64], limits: Limits) -> str:
    rms = math.sqrt(float(np.mean(np.square(expected))))
    median = float(np.median(margin))
    if median <= _CONCLUSIVE * limits.relative_l2 * rms:
        return (
            f"half of the samples are decided by less than {median:.2g}, which an allowed error can turn; "
            "give samples and weights that decide"
        )
    if len(np.unique(expected.argmax(axis=1))) == 1 and len(expected) > 1:
        return "every sample has the same top-1 class; give samples and weights that decide"
    return ""
