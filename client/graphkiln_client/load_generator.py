"""Generates load and measures it: closed loops (so many callers) and open loops (so many requests a second).

In an open loop a request's latency counts from the moment when it was due, not from when a caller was free to send it:
a stall of the server counts for every request that had to wait (no coordinated omission).

Source: G. Tene, "How NOT to Measure Latency"; B. Schroeder et al., "Open Versus Closed: A Cautionary Tale" (2006).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import ClientError

Send = Callable[[], object]
"""Sends one request and waits for its response; thread-safe; raises the `ClientError` family only."""

_WINDOWS = 10
_STUDENT_T = 2.262
"""Two-sided 95% quantile of Student's t with `_WINDOWS - 1` degrees of freedom."""
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_MAX_CALLERS = 256
"""Callers of an open loop: that many requests can be in flight; those due later wait, and their wait counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was measured between the end of the warm-up and the end. The names are keys of `graphkiln bench --json`.

    Attributes:
        seconds: How long that was.
        answered: Requests that got their response.
        unsent: Requests of an open loop that were due and not even sent: all callers were waiting.
        errors: Kinds of errors -> how many requests ended with one.
        per_second: Responses per second.
        per_second_range: 95% confidence interval of that, from ten windows of time.
        latency_ms: Percentiles of the latencies, by their names (`p50` ... `p99.9`), and `mean`; unsent requests count
            with the time that they had waited at the end.
        client_cores: CPU seconds of this process per second.
    """

    seconds: float
    answered: int
    unsent: int
    errors: dict[str, int]
    per_second: float
    per_second_range: tuple[float, float]
    latency_ms: dict[str, float]
    client_cores: float


@dataclass(slots=True)
class _Trace:
    """The records of one caller, so that nothing is locked: (due, done) of responses, (done, kind) of errors."""

    responses: list[tuple[float, float]] = field(default_factory=list)
    errors: list[tuple[float, str]] = field(default_factory=list)

    def record(self, send: Send, due: float) -> None:
        """Sends one request and records how it ended."""
        try:
            send()
        except ClientError as error:
            self.errors.append((time.perf_counter(), type(error).__name__))
        else:
            self.responses.append((due, time.perf_counter()))


def closed_loop(
    send: Send, concurrency: int, seconds: float, *, warmup_s: float, at_start: Callable[[], None]
) -> Measurement:
    """Measures callers that each send their next request when they have the last response.

    Args:
        send: Sends one request.
        concurrency: How many callers.
        seconds: How long to measure.
        warmup_s: How long they send before that.
        at_start: Called between warm-up and measurement, beside the running load.
    """
    stop = threading.Event()

    def work(trace: _Trace) -> None:
        while not stop.is_set():
            trace.record(send, time.perf_counter())

    period = _run(work, concurrency, stop, seconds=seconds, warmup_s=warmup_s, at_start=at_start)
    due, done = period.responses.T
    inside = (done >= period.begin) & (done < period.end)
    return period.measurement((done - due)[inside] * 1e3, unsent=0)


def open_loop(send: Send, rate: float, seconds: float, *, warmup_s: float, at_start: Callable[[], None]) -> Measurement:
    """Measures requests that come at random moments, on average `rate` a second, whatever the server does.

    Args:
        send: Sends one request.
        rate: Requests per second; the times between them are exponential (a Poisson process).
        seconds: How long to measure.
        warmup_s: How long requests come before that.
        at_start: As for `closed_loop`.
    """
    stop = threading.Event()
    arrivals = iter(_arrivals(rate, warmup_s + seconds))
    unsent: list[float] = []
    lock = threading.Lock()

    def work(trace: _Trace) -> None:
        while True:
            with lock:
                due = next(arrivals, None)
            if due is None:
                return
            is_early = due > time.perf_counter()
            stop.wait(max(due - time.perf_counter(), 0))
            if stop.is_set():
                if due > time.perf_counter():
                    return  # not due any more
                if not is_early:
                    unsent.append(due)
                    return
            trace.record(send, due)  # also just after the end: a caller was free when it was due, before

    period = _run(work, _MAX_CALLERS, stop, seconds=seconds, warmup_s=warmup_s, at_start=at_start)
    left = np.array([due for due in (*unsent, *arrivals) if period.begin <= due < period.end])
    due, done = period.responses.T
    inside = (due >= period.begin) & (due < period.end)
    waited = np.concatenate([(done - due)[inside], period.end - left])
    return period.measurement(waited * 1e3, unsent=len(left))


def _arrivals(rate: float, seconds: float) -> list[float]:
    generator = np.random.default_rng(0)  # the same arrivals every time
    gaps = generator.exponential(1 / rate, int(rate * seconds * 1.2) + 100)
    return [float(moment) for moment in time.perf_counter() + np.cumsum(gaps)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Period:
    """What all callers recorded, and which part of it counts."""

    traces: list[_Trace]
    begin: float
    end: float
    cpu_s: float

    @property
    def responses(self) -> npt.NDArray[np.float64]:
        """`[requests, 2]`: when each was due, and when it was done."""
        pairs = [pair for trace in self.traces for pair in trace.responses]
        return np.array(pairs, np.float64).reshape(-1, 2)

    def measurement(self, latencies_ms: npt.NDArray[np.float64], *, unsent: int) -> Measurement:
        seconds = self.end - self.begin
        done = self.responses[:, 1]
        counts, _ = np.histogram(done[done < self.end], _WINDOWS, (self.begin, self.end))
        rates = counts / seconds * _WINDOWS
        mean, margin = float(rates.mean()), _STUDENT_T * float(rates.std(ddof=1)) / _WINDOWS**0.5
        kinds = [name for trace in self.traces for moment, name in trace.errors if self.begin <= moment < self.end]
        return Measurement(
            seconds=seconds,
            answered=int(counts.sum()),
            unsent=unsent,
            errors=dict(sorted(Counter(kinds).items())),
            per_second=mean,
            per_second_range=(max(mean - margin, 0.0), mean + margin),
            latency_ms=_percentiles(latencies_ms),
            client_cores=self.cpu_s / seconds,
        )


def _run(
    work: Callable[[_Trace], None],
    callers: int,
    stop: threading.Event,
    *,
    seconds: float,
    warmup_s: float,
    at_start: Callable[[], None],
) -> _Period:
    traces = [_Trace() for _ in range(callers)]
    threads = [threading.Thread(target=work, args=(trace,), daemon=True) for trace in traces]
    for thread in threads:
        thread.start()
    try:
        time.sleep(warmup_s)
        at_start()
        begin, cpu_s = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return _Period(traces=traces, begin=begin, end=end, cpu_s=cpu_s)


def _percentiles(milliseconds: npt.NDArray[np.float64]) -> dict[str, float]:
    if not milliseconds.size:
        return {}
    values = zip(_PERCENTILES, np.percentile(milliseconds, _PERCENTILES), strict=True)
    return {**{f"p{percent:g}": float(value) for percent, value in values}, "mean": float(milliseconds.mean())}
