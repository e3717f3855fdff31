"""One measurement in one line."""

from __future__ import annotations

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.document import in_words
from graphkiln.tuning.trials import Bare, Failed, LoadShape, OpenLoop
from graphkiln.tuning.tuner import Progress

_LONGEST = 100


def line_of(progress: Progress, default: Candidate, budget_s: float) -> str:
    """What was measured, under which load, and what it did.

    Args:
        progress: What has just been done.
        default: Candidates are told by what distinguishes them from it.
        budget_s: Seconds that all measurements may take.
    """
    words = in_words(progress.candidate, default)
    return f"{progress.spent_s:.0f} of {budget_s:.0f} s: {words}{_load(progress.load)}: {_outcome(progress)}"


def _load(load: LoadShape | None) -> str:
    if load is None:
        return ", its session alone"
    return f", {load.rate:.4g}/s" if isinstance(load, OpenLoop) else f", {load.callers} callers"


def _outcome(progress: Progress) -> str:
    outcome = progress.outcome
    if isinstance(outcome, Failed):
        return f"failed: {_shortened(outcome.reason)}"
    if isinstance(outcome, Bare):
        return f"wrong: {_shortened(outcome.accuracy)}" if outcome.accuracy else f"{outcome.batch_s[1] * 1e3:.3g} ms"
    p99_ms, per_second = outcome.latency.p99.value * 1e3, outcome.throughput.value
    p99 = f"p99 {p99_ms:.3g} ms" if p99_ms < float("inf") else "more than 1 in 100 requests failed"
    return f"{per_second:.4g}/s, {p99}" + (f" ({outcome.warning})" if outcome.warning else "")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
