"""Gates of a rollout: whether its candidate may go on, by bounds that hold however often they are looked at.

All bounds are confidence sequences (`graphkiln_backend.proof.sequential`). Over a whole rollout, each of these has a
probability of at most `ALPHA`:

- A candidate whose decisions agree less often than `agree` is promoted. For that it must pass the shadow, so that the
  lower bound of agreement has the whole of `ALPHA`.
- A candidate within all limits is aborted because it is found to exceed one. Any gate of any step could do that, so
  that each has a part: the steps equal ones (each begins to count anew), and of a step the decisions three fifths,
  failures one fifth, latencies one fifth.

The bounds assume that each request is like any other, whatever happened before; a drift of the traffic within a step is
averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from graphkiln_backend.proof.sequential import lower_share, upper_share
from graphkiln_backend.server.rollouts import Gates, Latencies, Progress

ALPHA = 0.05
_DECISIONS, _FAILURES, _LATENCIES = 0.6, 0.2, 0.2  # parts of `ALPHA` for aborts
_SLOW = 0.01  # share of requests slower than the p99 latency
# A candidate that gets a tenth of the requests computes the same graph 0.1 ms slower, because its caches are cold: in
# 0.17 ms instead of 0.09, at a p99 of 0.7 ms instead of 1.1 (digits, two busy cores, 28 November 2026). Differences of
# that order are not judged: for the smallest graphs they are a ratio of 2.
_COLD_S = 0.0005
_TRAFFIC_REQUESTS = 1000  # of a step with traffic for the candidate, if `requests` is not given


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of the gates on a step of a rollout.

    Attributes:
        outcome: `pass` for the next step, `fail` to abort, `wait` for more requests.
        reason: Why, in one line.
        low: Lower bound of the share of requests with the same decision.
        high: Upper bound.
    """

    outcome: Literal["wait", "pass", "fail"]
    reason: str
    low: float
    high: float


def judge(progress: Progress, gates: Gates) -> Verdict:
    """Judge a step of a rollout by the requests that it has seen.

    In the shadow, a candidate that is not proven to agree after `requests` comparisons fails, and already before, as
    soon as agreement of all the remaining ones could not prove it any more. A step with traffic, of which few requests
    are compared, passes after `requests` requests if nothing speaks against it. Without `then` there is no next step:
    the verdict is `wait` until the user decides.

    Args:
        progress: Counts since the step began.
        gates: The conditions.
    """
    low, high = agreement_bounds(progress, gates)
    if fault := next(_faults(progress, gates, high), ""):
        return Verdict("fail", fault, low, high)
    if missing := _missing(progress, gates, low):
        return Verdict("wait", missing, low, high)
    if not gates.then:
        return Verdict("wait", f"all conditions are met: {_passed(progress, gates, low)}", low, high)
    return Verdict("pass", _passed(progress, gates, low), low, high)


def agreement_bounds(progress: Progress, gates: Gates) -> tuple[float, float]:
    """Bounds of the share of requests with the same decision, among those that are decided."""
    high = upper_share(progress.disagreed, _decided(progress), ALPHA)
    low = lower_share(progress.disagreed, _decided(progress), _alpha(gates, _DECISIONS))
    return 1 - high, 1 - low


def _faults(progress: Progress, gates: Gates, high: float) -> Iterator[str]:
    """Reasons to abort."""
    given, alpha = progress.requests, _alpha(gates, _FAILURES)
    if gates.errors and (least := lower_share(progress.failed, given, alpha)) > gates.errors:
        yield (
            f"the candidate failed on {progress.failed} of {given} requests: at least {least:.2%}, allowed are "
            f"{gates.errors:.2%}" + (f"; the last failure: {progress.failure}" if progress.failure else "")
        )
    # In shadow the candidate computes on idle cores.
    if gates.p99_ratio and not _is_shadow(progress) and (slow := _slow_share(progress, gates)) > _SLOW:
        yield (
            f"at least {slow:.2%} of the candidate's answers take more than {gates.p99_ratio:g} times the p99 latency "
            f"of version {progress.serving} and {1000 * _COLD_S:g} ms more, allowed is 1%"
        )
    if gates.agree and high < gates.agree:
        yield (
            f"{progress.disagreed} of {_decided(progress)} decisions differ: at most {_percent(high)} agree, "
            f"{_percent(gates.agree)} are asked for"
        )
    elif gates.agree and gates.requests and _is_shadow(progress) and not _can_agree(progress, gates):
        yield (
            f"{progress.disagreed} of {_decided(progress)} decisions differ: {gates.requests} requests cannot prove "
            f"any more that {_percent(gates.agree)} agree"
        )


def _missing(progress: Progress, gates: Gates, low: float) -> str:
    """Describe the unmet condition of the step, or return an empty string."""
    if not gates.are_set:
        return "no conditions are set"
    if _is_shadow(progress):
        seen, needed = progress.compared, gates.requests
    else:
        seen, needed = progress.requests, gates.requests or _TRAFFIC_REQUESTS
    if seen < max(needed, 1):
        return f"{seen} of {needed} requests" if needed else "no request yet"
    if _is_shadow(progress) and gates.agree and low < gates.agree:
        return f"at least {_percent(low)} agree, {_percent(gates.agree)} are asked for"
    return ""


def _passed(progress: Progress, gates: Gates, low: float) -> str:
    if _is_shadow(progress) and gates.agree:
        return f"at least {_percent(low)} of {_decided(progress)} decisions agree"
    return f"{progress.requests} requests without a fault"


def _can_agree(progress: Progress, gates: Gates) -> bool:
    """True if agreement of all the requests that remain would prove it."""
    remaining = max(0, gates.requests - progress.compared)
    differing = upper_share(progress.disagreed, _decided(progress) + remaining, ALPHA)
    return 1 - differing >= gates.agree


def _slow_share(progress: Progress, gates: Gates) -> float:
    """Lower bound of the share of the candidate's latencies above the ratio times the serving version's p99.

    The p99 is the shortest limit of a bucket that at most 1% of the serving version's latencies exceed by their upper
    bound. It is below the true p99 only if the bound of that share is wrong: shares fall with the limit, so choosing
    the limit by the data costs nothing. Half of the error probability is for it, half for the candidate's share.
    """
    alpha = _alpha(gates, _LATENCIES) / 2
    serving, candidate = progress.serving_latency, progress.candidate_latency
    limit_s, slower = 0.0, 0
    for bucket in reversed(range(len(serving.counts))):
        if upper_share(slower, serving.total, alpha) > _SLOW:
            break
        limit_s = Latencies.limit_of(bucket)
        slower += serving.counts[bucket]
    if not limit_s:  # too few
        return 0.0
    limit_s = max(gates.p99_ratio * limit_s, limit_s + _COLD_S)
    return lower_share(candidate.longer_than(limit_s), candidate.total, alpha)


def _is_shadow(progress: Progress) -> bool:
    return progress.phase != "traffic"


def _decided(progress: Progress) -> int:
    """Comparisons that say something: ties within the noise of the policy do not."""
    return progress.agreed + progress.disagreed


def _alpha(gates: Gates, part: float) -> float:
    """Probability that one gate of one step aborts wrongly; the shadow is a step, too."""
    return ALPHA * part / (len(gates.then) + 1)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
