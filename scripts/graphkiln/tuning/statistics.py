"""Statistics of a measurement: bounds on quantiles of latency, and intervals of throughput.

The bounds are distribution-free: the number of requests slower than a quantile is binomial. Requests that share a
queue are correlated, so that n of them carry less information than n independent ones. The ratio (`inflation`) is
estimated from blocks of successive requests, as the variance of block means relative to that of independent requests;
the binomial distribution is evaluated for the equivalent number of independent requests. If these are too few for a
bound (for example because the machine's speed changed), the tail is assumed to be exponential.

Sources: H. A. David, H. N. Nagaraja, "Order Statistics", 3rd ed. (2003), 7.1 (bounds on quantiles); A. M. Law,
"Simulation Modeling and Analysis", 5th ed. (2015), 9.5.3 (batch means).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln.bench.generator import WINDOWS, mean_and_margin
from graphkiln.tuning.target import CONFIDENCE, QUANTILE

# `[requests]` seconds, ordered by due time; infinite for failed requests.
Seconds = npt.NDArray[np.float64]

# Number of blocks of successive requests or of time: few, so that a block is longer than the memory of a queue.
BLOCKS = WINDOWS
# Correction of a variance estimated from `BLOCKS` blocks, for one-sided bounds at 95%: quantile of Student's t divided
# by that of the normal distribution.
FEW_BLOCKS = (1.833 / 1.645) ** 2


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% confidence interval.

    Attributes:
        value: Estimate.
        lower: Lower bound; may be 0.
        upper: Upper bound; may be infinite.
    """

    value: float
    lower: float
    upper: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval multiplied by a factor above 0."""
        return Interval(self.value * factor, self.lower * factor, self.upper * factor)

    def is_above(self, other: Interval) -> bool:
        """Return true if this value is significantly larger: the intervals do not overlap."""
        return self.lower > other.upper


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Summary of the latencies of one measurement, in seconds.

    Attributes:
        count: Number of requests.
        mean_s: Mean of the answered requests.
        p99: 99th percentile with one-sided 95% bounds; the upper bound is infinite for too few requests.
        inflation: Number of requests that carry the information of one independent request; 1 without a shared queue.
        p99_wide_s: Upper bound on p99 for any number of requests, assuming an exponential tail.
        mean_margin_s: Half width of the 95% interval of the mean; infinite for too few requests.
    """

    count: int
    mean_s: float
    p50_s: float
    p99: Interval
    inflation: float = 1.0
    p99_wide_s: float = math.inf
    mean_margin_s: float = math.inf

    @classmethod
    def of(cls, latencies: Seconds) -> Latency:
        """Summarize latencies, ordered by due time.

        Raises:
            ValueError: `latencies` is empty.
        """
        if not latencies.size:
            raise ValueError("no latencies")
        answered = latencies[np.isfinite(latencies)]
        return cls(
            count=latencies.size,
            mean_s=float(answered.mean()) if answered.size else math.inf,
            p50_s=float(np.quantile(latencies, 0.5, method="higher")),
            p99=quantile_bounds(latencies),
            p99_wide_s=wide_bound(latencies),
            inflation=inflation(latencies),
            mean_margin_s=_mean_margin(answered),
        )

    @property
    def p99_at_most_s(self) -> float:
        """Upper bound on p99: the distribution-free one if there are enough requests for it."""
        return min(self.p99.upper, self.p99_wide_s)

    @property
    def p99_words(self) -> str:
        """The 99th percentile for users."""
        if math.isinf(self.p99.value):
            return f"more than 1 in 100 of {self.count} requests failed or were not sent in time"
        return f"p99 was {self.p99.value * 1e3:.3g} ms"

    def scaled(self, factor: float) -> Latency:
        """Return the latencies on a machine that is slower by a factor."""
        return Latency(
            count=self.count,
            mean_s=self.mean_s * factor,
            p50_s=self.p50_s * factor,
            p99=self.p99.scaled(factor),
            p99_wide_s=self.p99_wide_s * factor,
            inflation=self.inflation,
            mean_margin_s=self.mean_margin_s * factor,
        )


def quantile_bounds(latencies: Seconds) -> Interval:
    """Return p99 with a lower and an upper bound, each at a confidence of 95%."""
    ordered = np.sort(latencies)
    count, factor = ordered.size, inflation(latencies)
    independent = max(1, int(count / factor))
    slower = most_slower(independent)
    below = math.ceil(fewest_slower(independent) * factor)
    above = math.floor(slower * factor) if slower is not None else -1
    return Interval(
        value=float(np.quantile(ordered, QUANTILE, method="higher")),
        lower=float(ordered[count - below]) if 1 <= below <= count else 0.0,
        upper=float(ordered[count - 1 - above]) if above >= 0 else math.inf,
    )


def wide_bound(latencies: Seconds) -> float:
    """Return an upper bound on p99 for requests that are too few for one without assumptions.

    The slowest of n independent requests is a bound on the quantile (1 - confidence)^(1/n). From there to p99, the tail
    is assumed to be exponential, as that of the time in a queue is. The number of independent requests is an estimate
    itself, hence the square root.

    Source: S. Asmussen, "Applied Probability and Queues", 2nd ed. (2003), XIII.5 (Cramér and Lundberg).
    """
    independent = max(1, int(latencies.size / inflation(latencies)))
    bounded = (1 - CONFIDENCE) ** (1 / independent)
    tail = max(1.0, math.log(1 - QUANTILE) / math.log(1 - bounded)) * (1 + 1 / math.sqrt(independent))
    return float(latencies.max()) * tail


def most_slower(count: int) -> int | None:
    """Return how many of `count` independent requests may exceed an upper bound on p99.

    This is the largest k with P(Binomial(count, 1%) <= k) <= 5%, or None if 0 is too many.
    """
    probability, k = 0.0, -1
    while True:
        probability += _binomial(count, k + 1, 1 - QUANTILE)
        if probability > 1 - CONFIDENCE:
            return k if k >= 0 else None
        k += 1


def fewest_slower(count: int) -> int:
    """Return how many of `count` independent requests must exceed a lower bound on p99.

    This is the smallest k with P(Binomial(count, 1%) >= k) <= 5%.
    """
    probability, k = 1.0, 0
    while probability > 1 - CONFIDENCE and k <= count:
        probability -= _binomial(count, k, 1 - QUANTILE)
        k += 1
    return k


def requests_needed(slower: int = 0, quantile: float = QUANTILE) -> int:
    """Return the number of independent requests for an upper bound on the quantile that `slower` may exceed.

    For example, the slowest of 299 requests is a bound on p99 at 95%; a larger `slower` gives a tighter bound.
    """

    def is_enough(count: int) -> bool:
        return math.fsum(_binomial(count, each, 1 - quantile) for each in range(slower + 1)) <= 1 - CONFIDENCE

    high = slower + 1
    while not is_enough(high):
        high *= 2
    return bisect.bisect_left(range(high + 1), x=True, lo=slower + 1, key=is_enough)


def inflation(latencies: Seconds) -> float:
    """Estimate how many requests carry the information of one independent request; at least 1.

    Few requests exceed an extreme quantile, and their block ratio alone is biased low (bounds would hold in 85 of 100
    runs of a busy queue), so that the ratios at the median and at 90% count as well.
    """
    return max(1.0, *(_block_ratio(latencies, each) for each in (0.5, 0.9, QUANTILE)))


def throughput(done_s: Seconds, begin_s: float, end_s: float) -> Interval:
    """Return responses per second with the 95% interval of batch means over blocks of time."""
    counts, _ = np.histogram(done_s, BLOCKS, (begin_s, end_s))
    return mean_interval(counts * BLOCKS / (end_s - begin_s))


def mean_interval(blocks: npt.NDArray[np.float64]) -> Interval:
    """Return the mean of `BLOCKS` values with its 95% interval by Student's t."""
    mean, margin = mean_and_margin(blocks)
    return Interval(mean, max(0.0, mean - margin), mean + margin)


def _mean_margin(latencies: Seconds) -> float:
    """Half width of the 95% interval of the mean, by means of blocks of successive requests."""
    length = latencies.size // BLOCKS
    blocks = latencies[: length * BLOCKS].reshape(BLOCKS, length)
    means = mean_interval(blocks.mean(axis=1)) if length > 1 else Interval(0.0, 0.0, math.inf)
    return means.upper - means.value


def _block_ratio(latencies: Seconds, quantile: float) -> float:
    """Variance of the blocks' shares of slow requests, relative to that of independent requests."""
    length = latencies.size // BLOCKS
    if length < 2:
        return 1.0
    slow = latencies > np.quantile(latencies, quantile, method="higher")
    share = float(slow.mean())
    if not 0 < share < 1:
        return 1.0
    means = slow[: length * BLOCKS].reshape(BLOCKS, length).mean(axis=1)
    return FEW_BLOCKS * float(means.var(ddof=1)) * length / (share * (1 - share))


def _binomial(count: int, k: int, probability: float) -> float:
    """P(Binomial(count, probability) = k), computed by logarithms to avoid overflow."""
    if k > count:
        return 0.0
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(probability) + (count - k) * math.log1p(-probability))
