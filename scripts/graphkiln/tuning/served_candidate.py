"""A candidate on a server: loaded, watched, and judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphkiln.tuning.answer_watch import AnswerWatch
from graphkiln.tuning.candidate import ENGINE, PRECISION, Candidate
from graphkiln.tuning.energy import EnergyMeter
from graphkiln.tuning.offered_load import Arriving, plan_load, summarize
from graphkiln.tuning.questions import Questions
from graphkiln.tuning.server_watch import CpuTime, Placed, ServerWatch
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop
from graphkiln_backend.graph.cores import usable_cores
from graphkiln_client import Client
from graphkiln_client.load_generator import Recording
from graphkiln_client.load_job import Load, Target
from graphkiln_client.load_processes import record_load

_WARMUP_S = 0.5
_BUSY_GENERATOR = 0.5
"""Share of the cores from which on the load generator itself shapes what is measured."""

Record = Callable[[Target, Sequence[Mapping[str, Any]], Load, Callable[[], None]], Recording]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """How trials are loaded; the same for all candidates.

    Attributes:
        questions: What requests hold, and the right answers.
        arriving: How the requests of a rate come.
        timeout_s: How long a request may take before it counts as failed.
        rows: Of each request.
        record: Sends the load; the client's load generator unless a test says otherwise.
    """

    questions: Questions
    arriving: Arriving = field(default_factory=Arriving)
    timeout_s: float = 10.0
    rows: int = 1
    record: Record = record_load


@dataclass(slots=True)
class ServedCandidate:
    """A candidate that a server serves.

    Attributes:
        candidate: Its values.
        model: Name of the model.
        version: Its number; empty for the server's choice.
        client: Arguments of the client whose connection is loaded.
        asking: The same of the one that checks answers.
        loading: How it is loaded.
        placed: What really serves; None where that cannot be read back.
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
        """Loads it.

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
    """A warning where the load generator takes so much of the machine that the server must do without.

    Args:
        cores: CPU seconds of the load generator, per second.
        usable: Cores of the machine.
    """
    share = cores / usable
    return f"the load generator took {share:.0%} of the cores" if share > _BUSY_GENERATOR else ""


@dataclass(slots=True)
class _Meters:
    """What is read at both ends of a measurement: while the load lasts, not when all of it has been put away."""

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
        """Now, where the load ended before its time."""
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
