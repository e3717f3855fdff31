"""Measurement of a candidate on a server: its load, the server's processes, energy, and checks of answers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil

from graphkiln.bench.arrivals import Moments, bursts, poisson, read_trace
from graphkiln.bench.generator import MAX_CALLERS, Recording
from graphkiln.bench.job import Load, Target
from graphkiln.bench.processes import record_load
from graphkiln.tuning.candidate import ENGINE, PRECISION, Candidate
from graphkiln.tuning.questions import Arrays, Questions
from graphkiln.tuning.statistics import Interval, Latency, throughput
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop
from graphkiln_backend.graph.errors import ClientError, InvalidInput, MeasurementError
from graphkiln_backend.server.ports import fetch_metrics
from graphkiln_backend.system.resources import usable_cores
from graphkiln_client import Client

# The load of a trial: arrival times of requests, and the summary of a recording.


@dataclass(frozen=True, kw_only=True, slots=True)
class Arriving:
    """Arrival process of requests: Poisson, unless one of `burst` and `trace` is given.

    Attributes:
        burst: So many at a time.
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
        """Arrival times at a rate.

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
    """Plan the work of the load generator.

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
        is_open: Count requests by when they were due, not by when they were answered.
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


def _stretched(trace: Moments, rate: float, seconds: float, seed: int) -> Moments:
    """The trace over and over, from another of its gaps with each seed, its mean rate made `rate`."""
    gaps = np.diff(trace)
    gaps = np.roll(gaps, -(seed * 7919) % len(gaps)) / gaps.mean() / rate
    repeats = int(np.ceil(seconds * rate / len(gaps))) + 1
    moments = np.cumsum(np.tile(gaps, repeats))
    before: Moments = moments[moments < seconds]
    return before


# Memory, CPU time and liveness of the processes of a loaded server.

# Names, or parts of the first word, of the processes without which requests fail.
_SERVING = ("tritonserver", "triton_python_backend_stub")
_INFO = re.compile(r"^graphkiln_instance_info\{([^}]*)\} 1(?:\.0+)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Placement that an instance reports.

    Attributes:
        engine: That runs the graph.
        precision: That most of the arithmetic is computed in.
        device: Where.
    """

    engine: str
    precision: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision}"


class ServerWatch:
    """The processes of one server.

    Args:
        pid: Of its supervisor.
    """

    def __init__(self, pid: int) -> None:
        self._supervisor = psutil.Process(pid)
        self._serving = _serving(self._family())

    def memory_bytes(self) -> int | None:
        """PSS of all processes together (shared memory counts once); None where the kernel does not report it."""
        try:
            return sum(process.memory_full_info().pss for process in self._family())
        except (psutil.Error, AttributeError):
            return None

    def cpu_s(self) -> float:
        """CPU seconds of all processes that live, so far."""
        return sum(_cpu_s(process) for process in self._family())

    def death(self) -> str:
        """Describe a serving process that has ended since; "" if all live."""
        if not is_alive(self._supervisor):
            return "the server ended"
        alive = {process.pid for process in self._family() if is_alive(process)}
        gone = [name for pid, name in self._serving.items() if pid not in alive]
        return f"{gone[0]} was killed or crashed" if gone else ""

    def _family(self) -> Sequence[psutil.Process]:
        try:
            return [self._supervisor, *self._supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTime:
    """CPU seconds at a moment of a monotonic clock."""

    moment_s: float
    cpu_s: float

    def cores_until(self, later: Self) -> float:
        """Cores that were busy between two readings."""
        return max(0.0, later.cpu_s - self.cpu_s) / max(later.moment_s - self.moment_s, 1e-9)


def read_placement(metrics_url: str, model: str) -> tuple[Placed, ...]:
    """Read the placement of each instance of a model.

    Raises:
        MeasurementError: The server's metrics cannot be read.
    """
    try:
        text = fetch_metrics(metrics_url)
    except OSError as error:
        raise MeasurementError(f"the server's metrics cannot be read: {error}") from error
    return parse_placement(text, model)


def parse_placement(metrics: str, model: str) -> tuple[Placed, ...]:
    """Parse the placement of a model's instances from the text of a metrics page."""
    rows = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(metrics)]
    return tuple(_placed(row) for row in rows if row.get("model") == model)


def _placed(row: Mapping[str, str]) -> Placed:
    return Placed(engine=row.get("engine", ""), precision=row.get("precision", ""), device=row.get("device", ""))


def _serving(family: Sequence[psutil.Process]) -> dict[int, str]:
    found = {}
    for process in family:
        try:
            word = process.cmdline()[0].rpartition("/")[2] if process.cmdline() else process.name()
        except psutil.Error:
            continue
        if word.startswith(_SERVING):
            found[process.pid] = word
    return found


def is_alive(process: psutil.Process) -> bool:
    """Return false for zombies, too: an ended process is listed until its parent waits for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


# Energy by the machine's counters: RAPL for processors, NVML for GPUs; unknown where neither can be read.
#
# The counters of GPUs are not yet run on one: built from the documentation and tested without one.
#
# Sources: Linux kernel, "Power Capping Framework" (`energy_uj`, `max_energy_range_uj`); NVML API reference,
# `nvmlDeviceGetTotalEnergyConsumption`.

_POWERCAP = Path("/sys/class/powercap")
# Whole processors: their parts (`intel-rapl:0:1`) are in them already.
_PACKAGE = re.compile(r"intel-rapl:\d+")

# Counter -> joules since some moment.
Joules = Callable[[], Mapping[str, float]]


class EnergyMeter:
    """Joules between two moments.

    Args:
        powercap: The kernel's folder of counters.
        gpus: Reads the counters of the GPUs.
    """

    def __init__(self, powercap: Path = _POWERCAP, gpus: Joules | None = None) -> None:
        self._packages = _packages(powercap)
        self._gpus = gpus or _read_gpus
        self._before: Mapping[str, float] = {}

    def begin(self) -> None:
        """Take the first reading."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Joules since `begin`; None where no counter could be read twice."""
        now = self._read()
        shared = [name for name in self._before if name in now]
        return sum(self._since(name, now[name]) for name in shared) if shared else None

    def _since(self, name: str, now: float) -> float:
        """A counter starts again at 0 beyond its range."""
        used = now - self._before[name]
        path = self._packages.get(name)
        return used if used >= 0 or path is None else used + (_number(path / "max_energy_range_uj") or 0.0) / 1e6

    def _read(self) -> dict[str, float]:
        read = {name: _number(path / "energy_uj") for name, path in self._packages.items()}
        return {**{name: value / 1e6 for name, value in read.items() if value is not None}, **self._gpus()}


def _packages(powercap: Path) -> dict[str, Path]:
    if not powercap.is_dir():
        return {}
    return {path.name: path for path in sorted(powercap.iterdir()) if _PACKAGE.fullmatch(path.name)}


def _number(path: Path) -> float | None:
    """Return None if only root may read it."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _read_gpus() -> dict[str, float]:
    nvml = _nvml()
    if nvml is None:
        return {}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {
            f"gpu:{index}": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            for index, handle in enumerate(handles)
        }
    except nvml.NVMLError:  # an older GPU has no such counter
        return {}


def _nvml() -> Any:
    """NVIDIA's library, ready; None where it or its driver is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


# Checks of a loaded server's answers against those of the saved graph.
#
# The proof at load checks an idle session. Under load the same rows come in batches with others, in several
# instances, beside other runs. What goes wrong there may be right again a moment later, so that each answer is judged,
# in blocks of as many as a self-test has samples: the policy's limits are those of several samples together.

# Between two questions: five a second disturb nothing that is measured.
_PAUSE_S = 0.2
# Most of the offered requests that questions may be beside, and of a core that judging may take.
_SHARE = 0.02
# Answers that are judged together.
_BLOCK = 8

# Sends one request; raises the `ClientError` family only.
Ask = Callable[[Arrays], Arrays]


class AnswerWatch(AbstractContextManager["AnswerWatch"]):
    """Ask from a background thread until the context ends or an answer is wrong; at least one question.

    Args:
        ask: Sends a request.
        questions: What to ask, in turn.
        first: Number of the first one.
        rate: Requests per second that come meanwhile.
        engine: What computes the answers.
        precision: What it is to compute in.

    Attributes:
        judged: How many answers were held to the right ones.
    """

    def __init__(self, ask: Ask, questions: Questions, first: int, rate: float, *, engine: str, precision: str) -> None:
        self._ask, self._questions, self._next = ask, questions, first
        self._engine, self._precision = engine, precision
        self._pause_s = max(_PAUSE_S, 1 / (_SHARE * rate)) if rate else _PAUSE_S
        self._block: dict[int, Arrays] = {}
        self._last: dict[int, Arrays] = {}
        self.judged = 0
        self._objection = self._refusal = ""
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="answers", daemon=True)

    @property
    def next_question(self) -> int:
        """Number of the question that would come next."""
        return self._next

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
        number = self._next % len(self._questions.feeds)
        self._next += 1
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


_WARMUP_S = 0.5
# Share of the cores from which on the load generator itself shapes what is measured.
_BUSY_GENERATOR = 0.5

Record = Callable[[Target, Sequence[Mapping[str, Any]], Load, Callable[[], None]], Recording]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Load of trials, the same for all candidates.

    Attributes:
        questions: What requests hold, and the right answers.
        arriving: How the requests of a rate come.
        timeout_s: How long a request may take before it counts as failed.
        rows: Of each request.
        record: Sends the load; tests replace the client's load generator.
    """

    questions: Questions
    arriving: Arriving = field(default_factory=Arriving)
    timeout_s: float = 10.0
    rows: int = 1
    record: Record = record_load


@dataclass(slots=True)
class ServedCandidate:
    """A candidate on a running server.

    Attributes:
        candidate: Its values.
        model: Name of the model.
        version: Its number; empty for the server's choice.
        client: Arguments of the client whose connection is loaded.
        asking: The same of the one that checks answers.
        loading: How it is loaded.
        placed: Reported placement; None where it cannot be read.
        watch: The server's processes; None where they are on another machine.
    """

    candidate: Candidate
    model: str
    client: Mapping[str, Any]
    asking: Mapping[str, Any]
    loading: Loading
    placed: Placed | None = None
    watch: ServerWatch | None = None
    version: str = ""
    _asked: int = 0

    def measure(self, shape: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Load it.

        Args:
            shape: What requests come.
            seconds: How long to measure, after the warm-up.
            seed: Of the arrivals.
        """
        target = Target(client=self.client, model=self.model, version=self.version)
        load = plan_load(shape, self.loading.arriving, seconds=seconds, warmup_s=_WARMUP_S, seed=seed)
        meters = _Meters(watch=self.watch, seconds=seconds)
        rate = shape.rate if isinstance(shape, OpenLoop) else 0.0
        with Client(**self.asking) as client, self._watch_answers(client, rate) as answers:
            try:
                recording = self.loading.record(target, self.loading.questions.sent, load, meters.begin)
            finally:
                meters.end()
        self._asked = answers.next_question
        if reason := self._death() or _objection(answers):
            return Failed(reason=reason)
        found = self._summary(recording, meters, is_open=not isinstance(shape, ClosedLoop))
        return replace(found, answers=answers.judged)

    def _death(self) -> str:
        reason = self.watch.death() if self.watch else ""
        return f"under load, {reason}" if reason else ""

    def _watch_answers(self, client: Client, rate: float) -> AnswerWatch:
        values, questions = self.candidate.values, self.loading.questions
        engine = self.placed.engine if self.placed else str(values.get(ENGINE, "the engine"))
        precision = str(values.get(PRECISION, questions.saved))
        ask = client.model(self.model, self.version).infer
        return AnswerWatch(ask, questions, self._asked, rate, engine=engine, precision=precision)

    def _summary(self, recording: Recording, meters: _Meters, *, is_open: bool) -> Measured:
        latency, throughput = summarize(recording, is_open=is_open)
        seconds = recording.end - recording.begin
        counted = recording.of_open_loop() if is_open else recording.of_closed_loop()
        return Measured(
            latency=latency,
            throughput=throughput,
            seconds=seconds,
            errors=counted.errors,
            unsent=counted.unsent,
            client_cores=counted.client_cores,
            server_cores=meters.server_cores,
            memory_bytes=meters.memory_bytes,
            energy_j=meters.energy_j,
            placed=str(self.placed or ""),
            warning=describe_generator(counted.client_cores, usable_cores()),
        )


def _objection(answers: AnswerWatch) -> str:
    reason = answers.objection()
    return f"its answers under load are wrong: {reason}" if reason else ""


def describe_generator(cores: float, usable: int) -> str:
    """Warn if the load generator takes so much of the machine that it slows the server down.

    Args:
        cores: CPU seconds of the load generator, per second.
        usable: Cores of the machine.
    """
    share = cores / usable
    return f"the load generator took {share:.0%} of the cores" if share > _BUSY_GENERATOR else ""


@dataclass(slots=True)
class _Meters:
    """Readings at both ends of a measurement, taken while the load lasts."""

    watch: ServerWatch | None
    seconds: float
    memory_bytes: int | None = None
    server_cores: float | None = None
    energy_j: float | None = None
    _begin: CpuTime | None = None
    _energy: EnergyMeter = field(default_factory=EnergyMeter)
    _timer: threading.Timer | None = None
    _is_over: bool = False

    def begin(self) -> None:
        self._begin = self._read()
        self._energy.begin()
        self._timer = threading.Timer(self.seconds, self._take)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Take the second reading now, if the load ended early."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
        if not self._is_over:
            self._take()

    def _take(self) -> None:
        self._is_over = True
        self.energy_j = self._energy.joules()
        now = self._read()
        if self._begin and now:
            self.server_cores = self._begin.cores_until(now)
        self.memory_bytes = self.watch.memory_bytes() if self.watch else None

    def _read(self) -> CpuTime | None:
        return CpuTime(moment_s=time.monotonic(), cpu_s=self.watch.cpu_s()) if self.watch else None
