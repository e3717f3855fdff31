"""The load of a trial: which moments requests come at, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.tuning.statistics import Interval, Latency, throughput
from graphkiln.tuning.trials import ClosedLoop, LoadShape
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.arrivals import Moments, bursts, poisson, read_trace
from graphkiln_client.load_generator import MAX_CALLERS, Recording
from graphkiln_client.load_job import Load


@dataclass(frozen=True, kw_only=True, slots=True)
class Arriving:
    """How requests come; at most one of `burst` and `trace` is given, else they are Poisson arrivals.

    Attributes:
        burst: So many at a time.
        trace: Recorded arrival times, `[requests]` seconds; they are stretched to the rate of a trial.
    """

    burst: int = 1
    trace: Moments | None = None

    @classmethod
    def of(cls, burst: int | None, trace: Path | None) -> Arriving:
        """What the options of the command line say.

        Raises:
            InvalidInput: Both are given, or the file cannot be read, or holds a single moment.
        """
        if burst and trace:
            raise InvalidInput("--burst and --trace both say when requests come", hint="give one of them")
        moments = read_trace(trace) if trace else None
        if moments is not None and not moments[-1]:
            raise InvalidInput(f"--trace {trace}: all requests come at once", hint="a trace needs two moments or more")
        return cls(burst=burst or 1, trace=moments)

    def moments(self, rate: float, seconds: float, seed: int) -> Moments:
        """When requests are due at a rate.

        Args:
            rate: Requests per second.
            seconds: How long they come.
            seed: Of random arrivals; of a trace, where in it they begin.
        """
        if self.trace is not None:
            return _stretched(self.trace, rate, seconds, seed)
        return bursts(rate, seconds, self.burst, seed) if self.burst > 1 else poisson(rate, seconds, seed)

    def __str__(self) -> str:
        if self.trace is not None:
            return "as recorded, stretched to the rate"
        return f"bursts of {self.burst} at random moments" if self.burst > 1 else "Poisson arrivals"


def plan_load(shape: LoadShape, arriving: Arriving, *, seconds: float, warmup_s: float, seed: int) -> Load:
    """What the load generator is told.

    Args:
        shape: A rate, or a number of callers.
        arriving: How the requests of a rate come.
        seconds: How long to measure.
        warmup_s: How long requests are sent before that.
        seed: Of the arrivals.
    """
    if isinstance(shape, ClosedLoop):
        return Load(callers=shape.callers, seconds=seconds, warmup_s=warmup_s)
    moments = arriving.moments(shape.rate, warmup_s + seconds, seed)
    return Load(callers=MAX_CALLERS, seconds=seconds, warmup_s=warmup_s, arrivals=moments)


def latencies_of(recording: Recording, *, is_open: bool) -> npt.NDArray[np.float64]:
    """`[requests]` seconds in the order in which they were due; infinite for those that failed or were never sent.

    Args:
        recording: What the load generator recorded.
        is_open: Whether requests count by when they were due, or by when they were answered.
    """
    due, done = recording.responses.T
    counted = due if is_open else done
    inside = (counted >= recording.begin) & (counted < recording.end)
    failed = [moment for moment, _ in recording.errors(is_open=is_open)]
    lost = [*failed, *(moment for moment in recording.unsent if recording.begin <= moment < recording.end)]
    moments = np.concatenate([counted[inside], lost])
    latencies = np.concatenate([(done - due)[inside], np.full(len(lost), np.inf)])
    ordered: npt.NDArray[np.float64] = latencies[np.argsort(moments, kind="stable")]
    return ordered


def summarize(recording: Recording, *, is_open: bool) -> tuple[Latency, Interval]:
    """Latencies and responses per second of a recording; a load of which no request was due counts as one endless."""
    latencies = latencies_of(recording, is_open=is_open)
    latency = Latency.of(latencies if latencies.size else np.array([np.inf]))
    return latency, throughput(recording.responses[:, 1], recording.begin, recording.end)


def _stretched(trace: Moments, rate: float, seconds: float, seed: int) -> Moments:
    """The trace over and over, from another of its gaps with each seed, its mean rate made `rate`."""
    gaps = np.diff(trace)
    gaps = np.roll(gaps, -(seed * 7919) % len(gaps)) / gaps.mean() / rate
    repeats = int(np.ceil(seconds * rate / len(gaps))) + 1
    moments = np.cumsum(np.tile(gaps, repeats))
    before: Moments = moments[moments < seconds]
    return before
