"""Measurement of a candidate on a running server: its load, its processes, energy, and checks of its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil

from graphkiln.bench.arrivals import Moments, bursts, poisson, read_trace
from graphkiln.bench.generator import MAX_CALLERS, Recording
from graphkiln.bench.meters import ProcessMeter
from graphkiln.bench.processes import Load, Target, record_load
from graphkiln.page.server import parse_metrics, read_metrics
from graphkiln.tuning.candidate import PRECISION, Candidate
from graphkiln.tuning.questions import Arrays, Questions
from graphkiln.tuning.statistics import Interval, Latency, throughput
from graphkiln.tuning.trials import Failed, LoadShape, Measured, OpenLoop
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.system.resources import usable_cores
from graphkiln_client import Client

_WARMUP_S = 0.5
# Share of the cores from which on the load generator itself shapes the measurement.
_BUSY_GENERATOR = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arriving:
    """Arrival process of requests: Poisson, unless one of `burst` and `trace` is given.

    Attributes:
        burst: Requests that come at a time.
        trace: Recorded arrival times, `[requests]` seconds; they are stretched to the rate of a trial.
    """

    burst: int = 1
    trace: Moments | None = None

    @classmethod
    def of(cls, burst: int | None, trace: Path | None) -> Arriving:
        """Create from the options of the command line.

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
        """Arrival times in seconds; with another seed, a trace begins at another of its gaps."""
        if self.trace is None:
            return bursts(rate, seconds, self.burst, seed) if self.burst > 1 else poisson(rate, seconds, seed)
        gaps = np.diff(self.trace)
        gaps = np.roll(gaps, -(seed * 7919) % len(gaps)) / gaps.mean() / rate
        moments = np.cumsum(np.tile(gaps, int(np.ceil(seconds * rate / len(gaps))) + 1))
        within: Moments = moments[moments < seconds]
        return within

    def __str__(self) -> str:
        if self.trace is not None:
            return "as recorded, stretched to the rate"
        return f"bursts of {self.burst} at random moments" if self.burst > 1 else "Poisson arrivals"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Load of trials, the same for all candidates.

    Attributes:
        questions: Contents of requests, and the right answers.
        arriving: Arrivals of an open loop.
        timeout_s: Time after which a request counts as failed.
    """

    questions: Questions
    arriving: Arriving = field(default_factory=Arriving)
    timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Engine, precision of most of the arithmetic, and device that an instance reports."""

    engine: str
    precision: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision}"


@dataclass(slots=True)
class ServedCandidate:
    """A candidate on a running server.

    Attributes:
        candidate: Its values.
        model: Name of the model.
        client: Arguments of the client whose connection is loaded.
        asking: Arguments of the client that checks answers.
        loading: Its load.
        placed: Its reported placement.
        watch: Processes of its server.
    """

    candidate: Candidate
    model: str
    client: Mapping[str, Any]
    asking: Mapping[str, Any]
    loading: Loading
    placed: Placed
    watch: ServerWatch
    _asked: int = 0

    def measure(self, shape: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Measure under a load, after a warm-up; another seed gives other arrivals."""
        is_open, rate, callers, moments = isinstance(shape, OpenLoop), 0.0, MAX_CALLERS, None
        if isinstance(shape, OpenLoop):
            rate, moments = shape.rate, self.loading.arriving.moments(shape.rate, _WARMUP_S + seconds, seed)
        else:
            callers = shape.callers
        load = Load(callers=callers, seconds=seconds, warmup_s=_WARMUP_S, arrivals=moments)
        target, questions = Target(client=self.client, model=self.model), self.loading.questions
        engine, precision = self.placed.engine, str(self.candidate.values.get(PRECISION, questions.saved))
        meters = _Meters(self.watch, seconds)
        with Client(**self.asking) as client:
            ask = client.model(self.model).infer
            with AnswerWatch(ask, questions, self._asked, rate, engine=engine, precision=precision) as answers:
                try:
                    recording = record_load(target, questions.sent, load, meters.begin)
                finally:
                    meters.end()
        self._asked = answers.next_question
        if reason := self.watch.death():
            return Failed(reason=f"under load, {reason}")
        if reason := answers.objection():
            return Failed(reason=f"its answers under load are wrong: {reason}")
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
            warning=f"the load generator took {share:.0%} of the cores" if share > _BUSY_GENERATOR else "",
            answers=answers.judged,
        )


def latencies_of(recording: Recording, *, is_open: bool) -> npt.NDArray[np.float64]:
    """`[requests]` seconds in the order in which they were due; infinite for those that failed or were never sent.

    Requests of an open loop count by when they were due, those of a closed one by when they were answered.
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
    """Latencies and responses per second of a recording; one without any due request counts as one endless latency."""
    latencies = latencies_of(recording, is_open=is_open)
    latency = Latency.of(latencies if latencies.size else np.array([np.inf]))
    return latency, throughput(recording.responses[:, 1], recording.begin, recording.end)


# Names, or parts of the first word, of the processes without which requests fail.
_SERVING = ("tritonserver", "triton_python_backend_stub")
_INFO = "graphkiln_instance_info"


def read_placement(metrics_url: str, model: str) -> tuple[Placed, ...]:
    """Read the placement of each instance of a model.

    Raises:
        ConnectionFailed: The server's metrics cannot be read.
    """
    return parse_placement(read_metrics(metrics_url), model)


def parse_placement(metrics: str, model: str) -> tuple[Placed, ...]:
    """Parse the placement of a model's instances from the text of a metrics page."""
    labels = [
        each.labels for each in parse_metrics(metrics) if each.name == _INFO and each.labels.get("model") == model
    ]
    return tuple(Placed(**{key: each.get(key, "") for key in ("engine", "precision", "device")}) for each in labels)


class ServerWatch(ProcessMeter):
    """Memory, CPU time and liveness of a server's processes, by the PID of its supervisor."""

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
        """Describe a serving process that has ended since; "" if all live."""
        if not is_alive(self._supervisor):
            return "the server ended"
        alive = {process.pid for process in self.processes if is_alive(process)}
        gone = [name for pid, name in self._serving.items() if pid not in alive]
        return f"{gone[0]} was killed or crashed" if gone else ""


def is_alive(process: psutil.Process) -> bool:
    """Return false for zombies, too: an ended process is listed until its parent waits for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class _Meters:
    """Readings at both ends of a measurement, taken while the load lasts."""

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


_POWERCAP = Path("/sys/class/powercap")
# Whole processors: their parts (`intel-rapl:0:1`) are in them already.
_PACKAGE = "intel-rapl:[0-9]*"


class EnergyMeter:
    """Joules between two moments by RAPL and NVML; the counters of GPUs are not yet run on one.

    Sources: Linux kernel, "Power Capping Framework" (`energy_uj`, `max_energy_range_uj`); NVML API reference,
    `nvmlDeviceGetTotalEnergyConsumption`.
    """

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._packages = [path for path in powercap.glob(_PACKAGE) if path.name.count(":") == 1]
        self._before: Mapping[str, float] = {}

    def begin(self) -> None:
        """Take the first reading."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Joules since `begin`; None if no counter could be read twice."""
        now, used = self._read(), {}
        for name in self._before.keys() & now.keys():
            used[name] = now[name] - self._before[name]
            if used[name] < 0:  # a counter starts again at 0 beyond its range
                used[name] += (_read_number(Path(name) / "max_energy_range_uj") or 0.0) / 1e6
        return sum(used.values()) if used else None

    def _read(self) -> dict[str, float]:
        """Joules since some moment by counter; only root may read some."""
        read = {str(path): _read_number(path / "energy_uj") for path in self._packages}
        return {**{name: value / 1e6 for name, value in read.items() if value is not None}, **_read_gpus()}


def _read_number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _read_gpus() -> dict[str, float]:
    """Joules of each GPU; none without NVIDIA's library, its driver or, on older GPUs, its counters."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        return {f"gpu:{index}": read(handle) / 1e3 for index, handle in enumerate(handles)}
    except pynvml.NVMLError:
        return {}


# Between two questions: five a second disturb no measurement.
_PAUSE_S = 0.2
# Most of the offered requests that questions may be beside, and of a core that judging may take.
_SHARE = 0.02
# Answers that are judged together.
_BLOCK = 8

# Sends one request; raises the `ClientError` family only.
Ask = Callable[[Arrays], Arrays]


class AnswerWatch(AbstractContextManager["AnswerWatch"]):
    """Ask from a background thread until the context ends or an answer is wrong; at least one question.

    The proof at load checks an idle session. Under load the same rows come in batches with others, in several
    instances, beside other runs. An error there may be gone a moment later, so that each answer is judged, in blocks of
    as many as a self-test has samples: the policy's limits are those of several samples together.

    Args:
        ask: Sends a request.
        questions: Requests in turn.
        first: Number of the first one.
        rate: Requests per second of the load.
        engine: Engine of the instance.
        precision: Requested precision.

    Attributes:
        next_question: Number of the question that would come next.
        judged: Number of answers that were compared.
    """

    def __init__(self, ask: Ask, questions: Questions, first: int, rate: float, *, engine: str, precision: str) -> None:
        self.next_question, self.judged = first, 0
        self._ask, self._questions = ask, questions
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
        """Return the violation by an answer, or "". Call it after the context.

        Raises:
            BaseException: Asking itself failed.
        """
        if self._failure:
            raise self._failure
        if not self.judged:
            return f"not one of the requests whose answer is known was answered under load: {self._refusal}"
        return self._objection

    def _watch(self) -> None:
        try:
            while not self._objection:
                begun_s = time.thread_time()
                self._ask_next()
                used_s = time.thread_time() - begun_s
                if self._over.wait(max(self._pause_s, used_s / _SHARE)):
                    break
            if self._block and not self._objection:  # too few for a block of their own
                self._judge({**self._last, **self._block})
        except BaseException as error:  # noqa: BLE001 - it is raised where the answers are judged
            self._failure = error

    def _ask_next(self) -> None:
        number = self.next_question % len(self._questions.feeds)
        self.next_question += 1
        try:
            answer = self._questions.answer(number, self._ask(self._questions.request(number)))
        except ClientError as error:  # an overloaded server refuses, which the load counts
            self._refusal = str(error)
            return
        if number in self._block:  # others in between were not answered
            self._judge(self._block)
        self._block[number] = answer
        if len(self._block) == min(_BLOCK, len(self._questions.feeds)):
            self._judge(self._block)

    def _judge(self, found: dict[int, Arrays]) -> None:
        """Compare a block of answers with the policy, and keep it to complete a short last block."""
        self.judged += len(self._block)
        if not self._objection:
            self._objection = self._questions.objection(found, engine=self._engine, precision=self._precision)
        self._last, self._block = self._block, {}
