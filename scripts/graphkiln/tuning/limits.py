"""What keeps a configuration from doing better: the model, the queue, the batcher, the cores."""

from __future__ import annotations

from graphkiln.tuning.candidate import QUEUE_DELAY_US, Candidate
from graphkiln.tuning.standing import Point, Standing
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Measured, OpenLoop

_MUCH = 0.5
"""Share of the p99 that a part must have to be what limits."""


def limit_of(standing: Standing, bare: Bare, target: Target, cores: int) -> str:
    """What limits a candidate, in words.

    Args:
        standing: With what was measured of it.
        bare: Its session.
        target: What it was to meet.
        cores: Of the machine.
    """
    point = _hardest(standing, target)
    if point is None:
        return standing.lost
    measured, run_s = point.measured, min(bare.batch_s.values())
    if measured.errors:
        kind, count = max(measured.errors.items(), key=lambda each: each[1])
        return f"errors: {count} requests ended with {kind}"
    if isinstance(point.load, OpenLoop) and not measured.keeps_up:
        return f"throughput: {measured.throughput.value:.3g} of {point.load.rate:.3g} requests per second are answered"
    return _slowest_part(standing.candidate, measured, run_s, cores)


def _slowest_part(candidate: Candidate, measured: Measured, run_s: float, cores: int) -> str:
    """What the slowest requests wait for."""
    p99_s, delay_s = measured.latency.p99.value, max(0, candidate.number(QUEUE_DELAY_US, 0)) * 1e-6
    if run_s > _MUCH * p99_s:
        return f"the model: a run of one sample takes {run_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms"
    if delay_s > _MUCH * p99_s:
        return f"the batcher: it waits up to {delay_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms for more requests"
    if measured.server_cores is not None and measured.server_cores > 0.9 * (cores - measured.client_cores):
        return f"the cores: the server keeps {measured.server_cores:.2g} of {cores} busy"
    if measured.latency.p50_s < p99_s / 3:
        return f"the queue: half of the requests take {measured.latency.p50_s * 1e3:.3g} ms, the slowest wait"
    return f"a run under load takes {measured.latency.p50_s * 1e3:.3g} ms, alone {run_s * 1e3:.3g} ms"


def _hardest(standing: Standing, target: Target) -> Point | None:
    """The point that shows the limit: the lowest rate that missed the target, or else the last one.

    Where every load missed it, the one that came closest.
    """
    if standing.points and all(each.measured.latency.p99.value > target.p99_s for each in standing.points):
        return min(standing.points, key=lambda each: each.measured.latency.p99.value)
    missed = [
        each
        for each in standing.points
        if isinstance(each.load, OpenLoop) and each.measured.latency.p99_at_most_s > target.p99_s
    ]
    rates = {each.load.rate: each for each in missed if isinstance(each.load, OpenLoop)}
    return rates[min(rates)] if rates else (standing.points[-1] if standing.points else None)
