"""Closed loops (a number of callers) and open loops (a request rate), and their measurements.

`record_closed_loop` and `record_open_loop` send requests to a server for a fixed interval and record each of them;
`measure_throughput` calls any function, even one that takes seconds, and measures between completions.

In an open loop, the latency of a request is measured from its due time, not from the time when a caller was free to
send it, so that a stall of the server counts for all requests that had to wait (no coordinated omission).

Source: G. Tene, "How NOT to Measure Latency"; B. Schroeder et al., "Open Versus Closed: A Cautionary Tale" (2006).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import ClientError

# Sends a request and waits for its response; thread-safe; raises only `ClientError` and its subclasses.
Send = Callable[[], object]

WINDOWS = 10
STUDENT_T = 2.262  # two-sided 95% quantile of Student's t with `WINDOWS - 1` degrees of freedom
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
MAX_CALLERS = 256  # maximum number of requests in flight in an open loop


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement after the warm-up. The field names are keys of `graphkiln bench --json`.

    Attributes:
        due: Number of requests that were due in an open loop; 0 for a closed loop.
        unsent: Number of due requests of an open loop that were not sent because all callers were busy.
        errors: Number of failed requests by error type. Includes requests that failed after the end: those that were
            due before the end (open loop), or sent before the end (closed loop).
        per_second_range: 95% confidence interval of `per_second`, from ten time windows.
        latency_ms: Latency percentiles (`p50` ... `p99.9`) and `mean`. Unsent requests count with their waiting time.
        client_cores: CPU seconds per second of all load generator processes.
        processes: Number of load generator processes.
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
    """Records of one caller: (due, done) for responses, (due, done, type) for errors."""

    responses: list[tuple[float, float]] = field(default_factory=list)
    errors: list[tuple[float, float, str]] = field(default_factory=list)

    def record(self, send: Send, due: float) -> None:
        """Send one request and record its outcome."""
        try:
            send()
        except ClientError as error:
            self.errors.append((due, time.perf_counter(), type(error).__name__))
        else:
            self.responses.append((due, time.perf_counter()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Schedule of a load on the clock of `time.perf_counter()`, which all processes share.

    Attributes:
        at_start: Called at the start of the measurement, while the load is running.
    """

    seconds: float
    warmup_s: float
    start: float = field(default_factory=time.perf_counter)
    at_start: Callable[[], None] = field(default=lambda: None)


def record_closed_loop(send: Send, concurrency: int, timing: Timing) -> Recording:
    """Let each caller send its next request as soon as it has a response."""
    stop = threading.Event()

    def work(trace: _Trace) -> None:
        _sleep_until(timing.start, stop)
        while not stop.is_set():
            trace.record(send, time.perf_counter())

    return _run(work, concurrency, stop, timing)


def record_open_loop(send: Send, arrivals: Sequence[float], timing: Timing, callers: int = MAX_CALLERS) -> Recording:
    """Send requests at their due times.

    Args:
        send: Sends one request.
        arrivals: Due times in ascending seconds after the start of the warm-up.
        timing: Schedule of the load.
        callers: Maximum number of requests in flight; the waiting time of others counts.
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
                    return  # due after the end
                if not is_early:
                    unsent.append(due)
                    return
            trace.record(send, due)  # even just after the end, if a caller was free at the due time

    recording = _run(work, callers, stop, timing)
    waiting = [*unsent, *(timing.start + float(offset) for offset in left)]
    recording.unsent.extend(due for due in waiting if recording.begin <= due < recording.end)
    return recording


def _sleep_until(moment: float, stop: threading.Event) -> bool:
    """Sleep until a moment; return False if it has already passed."""
    is_early = moment > time.perf_counter()
    stop.wait(max(moment - time.perf_counter(), 0))
    return is_early


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Records of all callers, and the interval of the measurement.

    Attributes:
        begin: End of the warm-up.
        end: End of the measurement.
        cpu_s: CPU seconds of the callers' processes between `begin` and `end`.
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
        """Join the recordings of processes that ran at the same time."""
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
        """Due time and completion time of each response, `[responses, 2]`."""
        pairs = [pair for trace in self.traces for pair in trace.responses]
        return np.array(pairs, np.float64).reshape(-1, 2)

    def of_closed_loop(self) -> Measurement:
        """Summarize a closed loop.

        Responses before the end count for the rate. Latencies count for all requests sent before the end, so that a
        stall at the end is included.
        """
        return self._measurement(self._latencies_s() * 1e3, self.errors(is_open=False))

    def of_open_loop(self) -> Measurement:
        """Summarize an open loop, with all requests that were due before the end, sent or not."""
        waited_s, errors = self.waited_s, self.errors(is_open=True)
        return self._measurement(waited_s * 1e3, errors, due=len(waited_s) + len(errors))

    @property
    def waited_s(self) -> npt.NDArray[np.float64]:
        """Latency of each request of an open loop that was due before the end, sent or not, `[requests]`."""
        return np.concatenate([self._latencies_s(), self.end - np.array(self.unsent)])

    def _latencies_s(self) -> npt.NDArray[np.float64]:
        due, done = self.responses.T
        latencies_s: npt.NDArray[np.float64] = (done - due)[(due >= self.begin) & (due < self.end)]
        return latencies_s

    def errors(self, *, is_open: bool) -> list[tuple[float, str]]:
        """Return time and type of the errors that count, including requests that failed after the end.

        Args:
            is_open: True to count requests that were due in the measurement (open loop), False to count requests that
                were in flight (closed loop).
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
    """Compute the mean of `WINDOWS` values, and half of its 95% confidence interval.

    Source: A. M. Law, "Simulation Modeling and Analysis", 5th ed. (2015), 9.5.3 (batch means).
    """
    return float(windows.mean()), STUDENT_T * float(windows.std(ddof=1)) / WINDOWS**0.5


def _percentiles(milliseconds: npt.NDArray[np.float64]) -> dict[str, float]:
    if not milliseconds.size:
        return {}
    values = zip(_PERCENTILES, np.percentile(milliseconds, _PERCENTILES), strict=True)
    return {**{f"p{percent:g}": float(value) for percent, value in values}, "mean": float(milliseconds.mean())}


def in_turn(requests: Sequence[Send]) -> Send:
    """Return a thread-safe function that calls the next request each time."""
    if len(requests) == 1:
        return requests[0]
    turns = itertools.cycle(requests)  # `next` is atomic

    def send() -> object:
        return next(turns)()

    return send


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Throughput of a function.

    Attributes:
        per_second: Calls per second while all callers were busy.
        latencies_ms: Duration of each call.
        seconds: Duration of the whole measurement.
    """

    per_second: float
    latencies_ms: tuple[float, ...]
    seconds: float


def measure_throughput(call: Callable[[], object], callers: int, seconds: float) -> Throughput:
    """Call a function again and again from concurrent threads.

    Args:
        call: Function to measure; may raise any error.
        callers: Number of threads.
        seconds: Duration in which new calls begin; each caller makes at least one.

    Raises:
        BaseException: The first error of `call`, which stops all callers.
    """
    spans: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    started = time.perf_counter()

    def work() -> None:
        try:
            while True:
                begun = time.perf_counter()
                call()
                spans.append((begun, time.perf_counter()))
                if failures or time.perf_counter() - started >= seconds:
                    return
        except BaseException as error:  # noqa: BLE001 - raised below in the calling thread
            failures.append(error)

    if callers == 1:
        work()  # not in a thread: there, glibc's allocator slows down eager PyTorch by a quarter
    else:
        threads = [threading.Thread(target=work) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    completions = sorted(end for _, end in spans)
    return Throughput(
        per_second=_rate(started, completions, callers, started + seconds),
        latencies_ms=tuple((end - begun) * 1e3 for begun, end in spans),
        seconds=completions[-1] - started,
    )


def _rate(started: float, completions: Sequence[float], callers: int, deadline: float) -> float:
    """Compute the calls per second while all callers were busy.

    With several callers, the calls that fill and drain the pipeline are left out. The time is measured from completion
    to completion, so that batches are not cut. If less than a third of the measurement remains, all of it counts,
    because the calls of one batch complete together.
    """
    whole = len(completions) / (completions[-1] - started)
    if callers == 1:
        return whole
    first, least = completions[callers - 1], (deadline - started) / 3
    inside = [moment for moment in completions[callers:] if moment <= deadline]
    return len(inside) / (inside[-1] - first) if inside and inside[-1] - first >= least else whole
