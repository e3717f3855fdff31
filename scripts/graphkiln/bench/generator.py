"""Generate load and measure it: closed loops (so many callers) and open loops (so many requests a second).

In an open loop a request's latency counts from the moment when it was due, not from when a caller was free to send it:
a stall of the server counts for every request that had to wait (no coordinated omission).

Source: G. Tene, "How NOT to Measure Latency"; B. Schroeder et al., "Open Versus Closed: A Cautionary Tale" (2006).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import ClientError

# Sends one request and waits for its response; thread-safe; raises the `ClientError` family only.
Send = Callable[[], object]

WINDOWS = 10
STUDENT_T = 2.262  # two-sided 95% quantile of Student's t with `WINDOWS - 1` degrees of freedom
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
MAX_CALLERS = 256  # of an open loop: requests that can be in flight; those due later wait, and their wait counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement from the end of the warm-up to the end. The names are keys of `graphkiln bench --json`.

    Attributes:
        seconds: How long that was.
        answered: Requests that got their response.
        due: Requests of an open loop that were due in that time, whatever became of them; 0 of a closed loop.
        unsent: Requests of an open loop that were due and not even sent: all callers were waiting.
        errors: Kinds of errors -> how many requests ended with one, however much later they failed: in an open loop of
            those that were due in time, in a closed loop of those that were under way.
        per_second: Responses per second.
        per_second_range: 95% confidence interval of that, from ten windows of time.
        latency_ms: Percentiles of the latencies, by their names (`p50` ... `p99.9`), and `mean`; unsent requests count
            with the time that they had waited at the end.
        client_cores: CPU seconds of all processes that sent requests, per second.
        processes: How many these were.
    """

    seconds: float
    answered: int
    due: int
    unsent: int
    errors: dict[str, int]
    per_second: float
    per_second_range: tuple[float, float]
    latency_ms: dict[str, float]
    client_cores: float
    processes: int


@dataclass(slots=True)
class _Trace:
    """The records of one caller, so that nothing is locked: (due, done) of responses, (due, done, kind) of errors."""

    responses: list[tuple[float, float]] = field(default_factory=list)
    errors: list[tuple[float, float, str]] = field(default_factory=list)

    def record(self, send: Send, due: float) -> None:
        """Send one request and records how it ended."""
        try:
            send()
        except ClientError as error:
            self.errors.append((due, time.perf_counter(), type(error).__name__))
        else:
            self.responses.append((due, time.perf_counter()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times of a load, on the clock of `time.perf_counter()`, which all processes share.

    Attributes:
        seconds: How long to measure.
        warmup_s: How long requests are sent before that.
        start: When the first one may be sent.
        at_start: Called between warm-up and measurement, beside the running load.
    """

    seconds: float
    warmup_s: float
    start: float = field(default_factory=time.perf_counter)
    at_start: Callable[[], None] = field(default=lambda: None)


def record_closed_loop(send: Send, concurrency: int, timing: Timing) -> Recording:
    """Let each caller send its next request when it has the last response."""
    stop = threading.Event()

    def work(trace: _Trace) -> None:
        _sleep_until(timing.start, stop)
        while not stop.is_set():
            trace.record(send, time.perf_counter())

    return _run(work, concurrency, stop, timing)


def record_open_loop(send: Send, arrivals: Sequence[float], timing: Timing, callers: int = MAX_CALLERS) -> Recording:
    """Send requests when they are due, whatever the server does.

    Args:
        send: Sends one request.
        arrivals: When each is due, in seconds after the start of the warm-up, in ascending order.
        timing: When.
        callers: How many requests can be in flight; those due later wait, and their wait counts.
    """
    stop = threading.Event()
    left = iter(arrivals)
    unsent: list[float] = []
    lock = threading.Lock()

    def work(trace: _Trace) -> None:
        while True:
            with lock:
                offset = next(left, None)
            if offset is None:
                return
            due = timing.start + float(offset)
            is_early = _sleep_until(due, stop)
            if stop.is_set():
                if due > time.perf_counter():
                    return  # not due any more
                if not is_early:
                    unsent.append(due)
                    return
            trace.record(send, due)  # also just after the end: a caller was free when it was due, before

    recording = _run(work, callers, stop, timing)
    waiting = [*unsent, *(timing.start + float(offset) for offset in left)]
    recording.unsent.extend(due for due in waiting if recording.begin <= due < recording.end)
    return recording


def _sleep_until(moment: float, stop: threading.Event) -> bool:
    """Sleep until a moment; return False if it was over already."""
    is_early = moment > time.perf_counter()
    stop.wait(max(moment - time.perf_counter(), 0))
    return is_early


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The records of all callers, and the part of them that counts.

    Attributes:
        traces: Of each caller.
        begin: End of the warm-up.
        end: End of the measurement.
        cpu_s: CPU seconds of the callers' processes between these.
        processes: How many processes that were.
        unsent: Due times of requests of an open loop for which no caller was free.
    """

    traces: list[_Trace]
    begin: float
    end: float
    cpu_s: float
    processes: int = 1
    unsent: list[float] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Recording]) -> Recording:
        """The recording of several processes that sent requests at the same time."""
        return cls(
            traces=[trace for part in parts for trace in part.traces],
            begin=parts[0].begin,
            end=parts[0].end,
            cpu_s=sum(part.cpu_s for part in parts),
            processes=len(parts),
            unsent=[due for part in parts for due in part.unsent],
        )

    @property
    def responses(self) -> npt.NDArray[np.float64]:
        """`[requests, 2]`: when each was due, and when it was done."""
        pairs = [pair for trace in self.traces for pair in trace.responses]
        return np.array(pairs, np.float64).reshape(-1, 2)

    def of_closed_loop(self) -> Measurement:
        """The measurement: a response counts for the rate when it came in time.

        Its latency counts when the request was sent in time, also where it came long after the end: a server that
        stalls then would else look as fast as it was before.
        """
        return self._measurement(self._latencies_s() * 1e3, self.errors(is_open=False))

    def of_open_loop(self) -> Measurement:
        """The measurement: a request counts when it was due in time, even if no caller was free to send it."""
        waited_s, errors = self.waited_s, self.errors(is_open=True)
        return self._measurement(waited_s * 1e3, errors, due=len(waited_s) + len(errors))

    @property
    def waited_s(self) -> npt.NDArray[np.float64]:
        """`[requests]`: how long each request of an open loop waited that was due in time, sent or not."""
        return np.concatenate([self._latencies_s(), self.end - np.array(self.unsent)])

    def _latencies_s(self) -> npt.NDArray[np.float64]:
        """`[responses]`: of the requests that were due, or sent, in time."""
        due, done = self.responses.T
        latencies_s: npt.NDArray[np.float64] = (done - due)[(due >= self.begin) & (due < self.end)]
        return latencies_s

    def errors(self, *, is_open: bool) -> list[tuple[float, str]]:
        """The requests in time that ended with an error: the moment by which each counts, and the kind of the error.

        Args:
            is_open: Whether requests count by when they were due, as in an open loop; else by whether they were under
                way in time. In both, one that hangs fails after the end.
        """
        records = [record for trace in self.traces for record in trace.errors]
        if is_open:
            return [(due, kind) for due, _, kind in records if self.begin <= due < self.end]
        return [(done, kind) for due, done, kind in records if due < self.end and done >= self.begin]

    def _measurement(
        self, latencies_ms: npt.NDArray[np.float64], errors: Sequence[tuple[float, str]], due: int = 0
    ) -> Measurement:
        seconds = self.end - self.begin
        done = self.responses[:, 1]
        counts, _ = np.histogram(done[done < self.end], WINDOWS, (self.begin, self.end))
        mean, margin = mean_and_margin(counts / seconds * WINDOWS)
        return Measurement(
            seconds=seconds,
            answered=int(counts.sum()),
            due=due,
            unsent=len(self.unsent),
            errors=dict(sorted(Counter(kind for _, kind in errors).items())),
            per_second=mean,
            per_second_range=(max(mean - margin, 0.0), mean + margin),
            latency_ms=_percentiles(latencies_ms),
            client_cores=self.cpu_s / seconds,
            processes=self.processes,
        )


def _run(work: Callable[[_Trace], None], callers: int, stop: threading.Event, timing: Timing) -> Recording:
    traces = [_Trace() for _ in range(callers)]
    threads = [threading.Thread(target=work, args=(trace,), daemon=True) for trace in traces]
    for thread in threads:
        thread.start()
    try:
        time.sleep(max(timing.start + timing.warmup_s - time.perf_counter(), 0))
        timing.at_start()
        begin, cpu_s = time.perf_counter(), time.process_time()
        time.sleep(timing.seconds)
        end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return Recording(traces=traces, begin=begin, end=end, cpu_s=cpu_s)


def mean_and_margin(windows: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The mean of `WINDOWS` values, and half of its 95% interval by Student's t.

    Source: A. M. Law, "Simulation Modeling and Analysis", 5th ed. (2015), 9.5.3 (batch means).
    """
    return float(windows.mean()), STUDENT_T * float(windows.std(ddof=1)) / WINDOWS**0.5


def _percentiles(milliseconds: npt.NDArray[np.float64]) -> dict[str, float]:
    if not milliseconds.size:
        return {}
    values = zip(_PERCENTILES, np.percentile(milliseconds, _PERCENTILES), strict=True)
    return {**{f"p{percent:g}": float(value) for percent, value in values}, "mean": float(milliseconds.mean())}
