"""Measurement of a candidate on a running server: load, processes, energy, and checks of the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import psutil

from graphkiln.bench.arrivals import Arrivals, bursts, poisson, read_trace
from graphkiln.bench.generator import MAX_CALLERS, Recording
from graphkiln.bench.meters import EnergyMeter, ProcessMeter
from graphkiln.bench.processes import Load, Target, record_load
from graphkiln.page.server import parse_metrics, read_metrics
from graphkiln.story.server import LocalServer
from graphkiln.tuning.candidate import PRECISION, Candidate
from graphkiln.tuning.requests import Arrays, Requests
from graphkiln.tuning.statistics import Interval, Latency, throughput
from graphkiln.tuning.trials import Failed, LoadShape, Measured, OpenLoop
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.system.resources import usable_cores
from graphkiln_client import Client

_WARMUP_S = 0.5
# Share of the cores above which the load generator itself limits the measurement.
_BUSY_GENERATOR = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arriving:
    """Arrival process of requests: Poisson, unless one of `burst` and `trace` is given.

    Attributes:
        burst: Requests per arrival.
        trace: Recorded arrival times, `[requests]` in seconds, stretched to the rate of each measurement.
    """

    burst: int = 1
    trace: Arrivals | None = None

    @classmethod
    def of(cls, burst: int | None, trace: Path | None) -> Arriving:
        """Create from `--burst` and `--trace`.

        Raises:
            InvalidInput: Both are given, the file cannot be read, or all its requests have the same time.
        """
        if burst and trace:
            raise InvalidInput("--burst and --trace are mutually exclusive", hint="remove one of them")
        moments = read_trace(trace) if trace else None
        if moments is not None and not moments[-1]:
            raise InvalidInput(f"--trace {trace}: all requests arrive at once", hint="a trace needs at least two times")
        return cls(burst=burst or 1, trace=moments)

    def moments(self, rate: float, seconds: float, seed: int) -> Arrivals:
        """Return arrival times in seconds; the seed selects random numbers, or the gap at which a trace begins."""
        if self.trace is None:
            return bursts(rate, seconds, self.burst, seed) if self.burst > 1 else poisson(rate, seconds, seed)
        gaps = np.diff(self.trace)
        gaps = np.roll(gaps, -(seed * 7919) % len(gaps)) / gaps.mean() / rate
        moments = np.cumsum(np.tile(gaps, int(np.ceil(seconds * rate / len(gaps))) + 1))
        within: Arrivals = moments[moments < seconds]
        return within

    def __str__(self) -> str:
        if self.trace is not None:
            return "as recorded, stretched to the rate"
        return f"bursts of {self.burst} at random moments" if self.burst > 1 else "Poisson arrivals"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Load that is the same for all candidates.

    Attributes:
        requests: Contents of requests, with reference outputs.
        arriving: Arrival process of an open loop.
        timeout_s: Seconds after which a request counts as failed.
    """

    requests: Requests
    arriving: Arriving = field(default_factory=Arriving)
    timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Placement of an instance: engine, precision of most of the arithmetic, and device."""

    engine: str
    precision: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision}"


@dataclass(slots=True)
class ServedCandidate:
    """A candidate on a running server.

    Attributes:
        candidate: Served candidate.
        model: Name of the model.
        server: Addresses of the server: gRPC for the load, HTTP for the checks of answers.
        loading: Load for all candidates.
        placed: Reported placement.
        watch: Processes of the server.
    """

    candidate: Candidate
    model: str
    server: LocalServer
    loading: Loading
    placed: Placed
    watch: ServerWatch
    _next_request: int = 0

    def measure(self, shape: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Measure under a load after a warm-up; the seed selects the arrivals."""
        is_open, rate, callers, moments = isinstance(shape, OpenLoop), 0.0, MAX_CALLERS, None
        if isinstance(shape, OpenLoop):
            rate, moments = shape.rate, self.loading.arriving.moments(shape.rate, _WARMUP_S + seconds, seed)
        else:
            callers = shape.callers
        load = Load(callers=callers, seconds=seconds, warmup_s=_WARMUP_S, arrivals=moments)
        timeout_s = self.loading.timeout_s
        client = {"url": self.server.grpc_url, "timeout_s": timeout_s, "max_retries": 0}
        target = Target(client=client, model=self.model)
        requests = self.loading.requests
        engine, precision = self.placed.engine, str(self.candidate.values.get(PRECISION, requests.saved))
        meters = _Meters(self.watch, seconds)
        with Client(self.server.http_url, timeout_s=timeout_s, max_retries=0) as checking:
            ask = checking.model(self.model).infer
            with AnswerWatch(ask, requests, self._next_request, rate, engine=engine, precision=precision) as answers:
                try:
                    recording = record_load(target, requests.sent, load, meters.begin)
                finally:
                    meters.end()
        self._next_request = answers.next_request
        if reason := self.watch.death():
            return Failed(reason=f"under load, {reason}")
        if reason := answers.objection():
            return Failed(reason=f"wrong answers under load: {reason}")
        latency, per_second = summarize(recording, is_open=is_open)
        counted = recording.of_open_loop() if is_open else recording.of_closed_loop()
        share = counted.client_cores / usable_cores()
        return Measured(
            latency=latency,
            throughput=per_second,
            seconds=recording.end - recording.begin,
            errors=counted.errors,
            unsent=counted.unsent,
            client_cores=counted.client_cores,
            server_cores=meters.server_cores,
            memory_bytes=meters.memory_bytes,
            energy_j=meters.energy_j,
            placed=str(self.placed),
            warning=f"the load generator used {share:.0%} of the cores" if share > _BUSY_GENERATOR else "",
            answers=answers.checked,
        )


def latencies_of(recording: Recording, *, is_open: bool) -> npt.NDArray[np.float64]:
    """Return `[requests]` latencies in seconds, ordered by due time; infinite for failed and unsent requests.

    The measured interval selects requests of an open loop by due time, those of a closed loop by response time.
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
    """Return latencies and responses per second; a recording without requests counts as one infinite latency."""
    latencies = latencies_of(recording, is_open=is_open)
    latency = Latency.of(latencies if latencies.size else np.array([np.inf]))
    return latency, throughput(recording.responses[:, 1], recording.begin, recording.end)


# Prefixes of the names of processes that serve requests.
_SERVING = ("tritonserver", "triton_python_backend_stub")
_INFO = "graphkiln_instance_info"


def read_placement(metrics_url: str, model: str) -> tuple[Placed, ...]:
    """Read the placement of each instance of a model from the server's metrics.

    Raises:
        ConnectionFailed: The server's metrics cannot be read.
    """
    samples = parse_metrics(read_metrics(metrics_url))
    labels = [each.labels for each in samples if each.name == _INFO and each.labels.get("model") == model]
    return tuple(Placed(**{key: each.get(key, "") for key in ("engine", "precision", "device")}) for each in labels)


class ServerWatch(ProcessMeter):
    """Memory, CPU time and liveness of a server's processes, found by the PID of the supervisor."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._supervisor = psutil.Process(pid)
        self._serving: dict[int, str] = {}
        for process in self.processes:
            with suppress(psutil.Error):
                command = process.cmdline()
                word = command[0].rpartition("/")[2] if command else process.name()
                if word.startswith(_SERVING):
                    self._serving[process.pid] = word

    def death(self) -> str:
        """Return a description of a serving process that has ended; "" if all are alive."""
        if not is_alive(self._supervisor):
            return "the server ended"
        alive = {process.pid for process in self.processes if is_alive(process)}
        gone = [name for pid, name in self._serving.items() if pid not in alive]
        return f"{gone[0]} was killed or crashed" if gone else ""


def is_alive(process: psutil.Process) -> bool:
    """Return true if a process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class _Meters:
    """Meter readings at the beginning and the end of a measurement."""

    def __init__(self, watch: ServerWatch, seconds: float) -> None:
        self.memory_bytes: int | None = None
        self.server_cores: float | None = None
        self.energy_j: float | None = None
        self._watch, self._energy = watch, EnergyMeter()
        self._begun: tuple[float, float] | None = None  # monotonic and CPU seconds
        self._is_over = False
        self._timer = threading.Timer(seconds, self._take)
        self._timer.daemon = True

    def begin(self) -> None:
        self._begun = time.monotonic(), self._watch.cpu_s()
        self._energy.begin()
        self._timer.start()

    def end(self) -> None:
        """Take the second reading now, if the load ended early."""
        if self._begun is None:
            return
        self._timer.cancel()
        self._timer.join()
        if not self._is_over:
            self._take()

    def _take(self) -> None:
        self._is_over = True
        self.energy_j = self._energy.joules()
        if self._begun:
            seconds, cpu_s = time.monotonic() - self._begun[0], self._watch.cpu_s() - self._begun[1]
            self.server_cores = max(0.0, cpu_s) / max(seconds, 1e-9)
        self.memory_bytes = self._watch.memory_bytes()


# Seconds between checks: five requests per second do not disturb a measurement.
_PAUSE_S = 0.2
# Checks may add this share to the offered requests, and use this share of a core.
_SHARE = 0.02
# Number of answers that are compared together.
_BLOCK = 8

# Sends one request; raises only subclasses of `ClientError`.
Send = Callable[[Arrays], Arrays]


class AnswerWatch(AbstractContextManager["AnswerWatch"]):
    """Check answers from a background thread until the context ends or an answer is wrong.

    The proof at load checks an idle session. Under load, rows are batched with others and instances run concurrently,
    which may cause transient errors. Answers are compared in blocks of as many samples as a self-test has, because the
    limits of the numeric policy apply to several samples together.

    Args:
        ask: Sends a request.
        requests: Requests to send in turn.
        first: Number of the first request.
        rate: Requests per second of the load; 0 for a closed loop.
        engine: Engine of the instance.
        precision: Requested precision.

    Attributes:
        next_request: Number of the next request.
        checked: Number of compared answers.
    """

    def __init__(self, ask: Send, requests: Requests, first: int, rate: float, *, engine: str, precision: str) -> None:
        self.next_request, self.checked = first, 0
        self._send, self._requests = ask, requests
        self._engine, self._precision = engine, precision
        self._pause_s = max(_PAUSE_S, 1 / (_SHARE * rate)) if rate else _PAUSE_S
        self._block: dict[int, Arrays] = {}
        self._last: dict[int, Arrays] = {}
        self._objection = self._refusal = ""
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="answers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def objection(self) -> str:
        """Return the violation of the numeric policy, or "". Call it after the context.

        Raises:
            BaseException: The background thread failed.
        """
        if self._failure:
            raise self._failure
        if not self.checked:
            return f"no request of the checks was answered under load: {self._refusal}"
        return self._objection

    def _watch(self) -> None:
        try:
            while not self._objection:
                begun_s = time.thread_time()
                self._check_next()
                used_s = time.thread_time() - begun_s
                if self._over.wait(max(self._pause_s, used_s / _SHARE)):
                    break
            if self._block and not self._objection:  # an incomplete block is completed by the last one
                self._compare({**self._last, **self._block})
        except BaseException as error:  # noqa: BLE001 - `objection` raises it in the main thread
            self._failure = error

    def _check_next(self) -> None:
        number = self.next_request % len(self._requests.feeds)
        self.next_request += 1
        try:
            answer = self._requests.answer(number, self._send(self._requests.request(number)))
        except ClientError as error:  # refused by an overloaded server, which the load counts
            self._refusal = str(error)
            return
        if number in self._block:  # the requests in between were refused
            self._compare(self._block)
        self._block[number] = answer
        if len(self._block) == min(_BLOCK, len(self._requests.feeds)):
            self._compare(self._block)

    def _compare(self, found: dict[int, Arrays]) -> None:
        """Compare a block of answers, and keep it to complete a short last block."""
        self.checked += len(self._block)
        if not self._objection:
            self._objection = self._requests.objection(found, engine=self._engine, precision=self._precision)
        self._last, self._block = self._block, {}
