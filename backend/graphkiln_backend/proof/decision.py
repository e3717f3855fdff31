"""Decisions on scores and task results: agreement of two graphs, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.policy import Limits

_EXACT_UNTIL = 10_000  # for more results the share itself is as good as its bound; pixels are not independent anyway
_CONFIDENCE = 0.95
_CONCLUSIVE = 3.0  # samples are conclusive if their median margin is this many times the allowed error
_ROUNDING = 1e-9  # of a difference of two shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric on labeled samples, of the reference and of the judged graph.

    Attributes:
        name: mAP, mIoU, recall@1.
        before: Value of the reference, 0..1.
        after: Value of the judged graph.
    """

    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name} {self.after:.2%} instead of {self.before:.2%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDecision:
    """Agreement of two graphs on task results.

    Attributes:
        what: Counted results and the rule.
        agreeing: Number of equal results.
        total: Number of compared results.
        least: Required share of equal results.
        detail: Another figure, or empty.
        near_ties: Number of results that differ within the limits; they count as equal.
        metric: Metric of both on labeled samples, or None.
        inconclusive: Reason why agreement means nothing on these samples, or empty.
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
        """Return true if enough results agree and no metric fell; the metric alone decides if the row allows it."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Agreement of two graphs on the top-1 class.

    Attributes:
        samples: Number of samples.
        agreeing: Samples with the same top-1 class, or with a margin below the noise of fp32.
        interval: 95% confidence interval of the share of agreeing samples.
        accuracy: Accuracy of the reference and the judged graph, or None without labels.
        inconclusive: Reason why agreement means nothing on these samples, or empty.
    """

    samples: int
    agreeing: int
    interval: tuple[float, float]
    accuracy: tuple[float, float] | None = None
    inconclusive: str = ""

    def within(self, limits: Limits) -> bool:
        """Return true if enough samples agree, the accuracy held, or the samples are inconclusive."""
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
    """Decide each score output (floating-point, `[samples, classes]`); ranked scores are expanded to all classes.

    Args:
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Policy row.
        noise: As for `decide`.
        targets: As for `decide`.
        ranking: Outputs of a top-k in the graph, or None.
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
        if name in outputs and are_scores(array)
    ]


def scatter_scores(scores: AnyArray, indices: AnyArray, classes: int) -> AnyArray:
    """Expand the top-k scores to all classes; every other class gets the lowest of them.

    Args:
        scores: Scores in descending order, `[samples, k]`.
        indices: Their classes, `[samples, k]`.
        classes: Number of classes.

    Returns:
        A new array `[samples, classes]`.
    """
    scattered = np.repeat(scores[:, -1:], classes, axis=1)
    np.put_along_axis(scattered, indices.astype(np.int64), scores, axis=1)
    return scattered


def are_scores(array: AnyArray) -> bool:
    """Return true for scores of classes: floating-point, `[samples, classes]`."""
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
        reference: Trusted scores `[samples, classes]`, at least two classes.
        scores: Scores to judge.
        limits: Policy row.
        noise: Largest score difference caused by fp32 itself, measured on the same samples.
        targets: True classes, `[samples]`, or None.
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
    """Probability of that many successes or more, of a binomial distribution, by the shorter of its two sums."""
    if share <= 0:
        return 0.0
    is_short = successes > trials // 2
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(share)
        + (trials - k) * math.log1p(-share)
        for k in (range(successes, trials + 1) if is_short else range(successes))
    )
    if share >= 1:
        return 1.0
    total = math.fsum(math.exp(value) for value in logs)
    return total if is_short else 1 - total


def _inconclusive(expected: npt.NDArray[np.float64], margin: npt.NDArray[np.float64], limits: Limits) -> str:
    rms = math.sqrt(float(np.mean(np.square(expected))))
    median = float(np.median(margin))
    if median <= _CONCLUSIVE * limits.relative_l2 * rms:
        return (
            f"half of the samples have a margin below {median:.2g}, within the allowed error; "
            "give samples and weights that decide"
        )
    if len(np.unique(expected.argmax(axis=1))) == 1 and len(expected) > 1:
        return "every sample has the same top-1 class; give samples and weights that decide"
    return ""
