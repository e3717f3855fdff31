"""Tells the story: prepares every way, proves it against eager PyTorch, then measures all of them in turn."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln.story.facts import facts_of
from graphkiln.story.images import Images, choose
from graphkiln.story.judging import Judgment, judge, judge_parameter_gradients
from graphkiln.story.preparing import Prepared, prepare
from graphkiln.story.requests import Machine, Request
from graphkiln.story.results import Record, Round, Seen, document
from graphkiln.story.server import serving
from graphkiln.story.ways import BASE, LOWEST, TOP_K, Way, callers, commands, first_ways, image_files, last_ways
from graphkiln.story.work import Answers, EagerWork, ServedWork, SessionWork, StaticWork, Work
from graphkiln.story.worker import Meter, Worker
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.spelling import did_you_mean

ROUNDS = 5
_RECORD = "record.json"
_ALWAYS = ("eager", "reduced")
"""Whatever is asked for: the reference of all proofs, and the noise of fp32."""
_CHOOSING = ("mixed", "int8")
"""What decides about the precision of the last steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the story is.

    Attributes:
        doing: What happens now.
        done_s: Seconds of measuring that are done; 0 while the ways are prepared.
        total_s: Seconds of measuring that there are.
        figure: The last figure, in words.
    """

    doing: str
    done_s: float = 0.0
    total_s: float = 0.0
    figure: str = ""


Report = Callable[[Progress], None]


class Story:
    """One story as it is told: its ways, and what was seen of them so far.

    Attributes:
        ways: In the order of the table; the last two are known when the precision is.
        record: What was seen.
    """

    def __init__(self, request: Request, machine: Machine, *, resume: bool, report: Report) -> None:
        self._request = request
        self._machine = machine
        self._report = report
        self._path = request.folder / _RECORD
        self._opened: dict[str, _Open] = {}
        if resume:
            self.record = Record.read(self._path)
        else:
            shutil.rmtree(request.folder, ignore_errors=True)
            request.folder.mkdir(parents=True)
            self.record = Record(facts=facts_of(request, machine))

    @property
    def ways(self) -> tuple[Way, ...]:
        """All that are known so far."""
        later = last_ways(self.record.precision) if self.record.precision else ()
        return (*first_ways(self._machine), *later)

    @property
    def proven(self) -> bool:
        """Whether no step of the chain that was done changed the answers."""
        chain = [self.record.seen[way.key] for way in self.ways if not way.switch and way.key in self.record.seen]
        return all(seen.judgment.passed for seen in chain if seen.judgment)

    def document(self) -> dict[str, Any]:
        """All that was seen, as plain data."""
        facts = self._request, self._machine, self.record.derivative
        repeat = {way.key: commands(way, *facts) for way in self.ways}
        return document(self.ways, self.record, repeat)

    def tell(self, seconds: float, only: Sequence[str] = ()) -> None:
        """Prepares, proves and measures; what was done before is not done again.

        Args:
            seconds: How long each way is measured, all rounds together.
            only: Keys of the ways to measure; all when empty.

        Raises:
            InvalidInput: There is no such step.
            GraphkilnError: The model cannot be opened. What one way cannot do is kept as its refusal.
        """
        self._check_known(only)
        self._report(Progress(doing="opening the model"))
        prepared = prepare(self._request)
        images = choose(self._request.samples, prepared.classes)
        facts = {**self.record.facts, "images": images.description}
        self.record = replace(self.record, facts=facts, derivative=prepared.derivative)
        images.write(*image_files(self._request.folder))
        wanted = {*only, *_ALWAYS, *(_CHOOSING if {"compiled", "served"} & {*only} else ())}
        with ExitStack() as stack:
            stack.callback(self._opened.clear)

            def open_all(ways: Sequence[Way]) -> None:
                for way in ways:
                    if not only or way.key in wanted:
                        self._open(way, prepared, images, stack)

            open_all(first_ways(self._machine))
            precision = self.record.precision or self._lowest_proven()
            if not self.record.precision:
                self.record = replace(self.record, precision=precision)
                self._keep()
            open_all(last_ways(precision))
            self._measure(images, seconds)

    def _check_known(self, only: Sequence[str]) -> None:
        known = [way.key for way in (*first_ways(self._machine), *last_ways(Precision.FP32))]
        for key in only:
            if key not in known:
                raise InvalidInput(f"there is no step '{key}'", hint=did_you_mean(key, known))

    def _open(self, way: Way, prepared: Prepared, images: Images, stack: ExitStack) -> None:
        """Opens and proves one way, or keeps the reason why that cannot be done."""
        seen = self.record.seen.get(way.key, Seen())
        if seen.refused:
            return
        try:
            with ExitStack() as own:
                if way.unavailable:
                    raise MeasurementError(way.unavailable)
                self._report(Progress(doing=f"preparing: {way.title}"))
                work, pid = own.enter_context(self._work(way, prepared))
                worker = own.enter_context(Worker(work, way.title))
                if seen.judgment is None:
                    self._report(Progress(doing=f"proving: {way.title}"))
                    seen = replace(seen, judgment=self._judged(way, worker, images))
                stack.push(own.pop_all())  # a way that is refused runs on for nothing
        except GraphkilnError as error:
            if way.kind == "eager":
                raise
            seen = replace(seen, refused=str(error))
        else:
            self._opened[way.key] = _Open(way=way, worker=worker, pids=tuple(filter(None, (worker.pid, pid))))
        self._see(way, seen)

    @contextmanager
    def _work(self, way: Way, prepared: Prepared) -> Iterator[tuple[Work, int]]:
        """The way as plain data, and the process id of its server, or 0."""
        request, machine = self._request, self._machine
        spec, device = prepared.preprocess, machine.device
        if way.kind == "eager":
            yield EagerWork(request=request, derivative=prepared.derivative), 0
            return
        graph = prepared.version(way.model or BASE, machine)
        if way.kind == "static":
            training = prepared.training_graph()
            yield StaticWork(training_graph=training, forward_graph=graph, preprocess=spec, device=device), 0
            return
        if way.kind == "session":
            yield SessionWork(graph=graph, preprocess=spec, device=device), 0
            return
        name = graph.parents[1].name
        flags = tuple(word for setting in way.settings for word in ("--set", f"{name}.{setting}"))
        log = request.folder / f"{way.key}.log"
        with serving(graph.parents[2], flags=flags, log=log) as server:
            yield (
                ServedWork(
                    url=server.grpc_url,
                    model=name,
                    callers=callers(machine),
                    top_k=TOP_K if way.kind == "images" else 0,
                    gradient=request.gradient,
                ),
                server.pid,
            )

    def _judged(self, way: Way, worker: Worker, images: Images) -> Judgment:
        found = worker.answers(images.proven)
        if way.kind == "eager":
            _write_answers(self._request.folder, found)
        reference = _read_answers(self._request.folder)
        judged = judge(reference, found, way.limits, noise=self._noise(way), targets=images.targets)
        if way.kind == "static":
            expected, noise = self._opened["eager"].worker.parameter_gradients(images.proven[0])
            gradients, _ = worker.parameter_gradients(images.proven[0])
            judged = judge_parameter_gradients(judged, expected, gradients, noise)
        return judged

    def _noise(self, way: Way) -> float:
        """What fp32 itself makes of the scores, for a way that is coarser: the difference that step 2 made."""
        if way.precision is Precision.FP32:
            return 0.0
        reduced = self.record.seen.get("reduced", Seen()).judgment
        if reduced is None:
            raise MeasurementError("nobody knows the noise of fp32 beside it: step 2 was not proven")
        return reduced.difference

    def _lowest_proven(self) -> Precision:
        """The first of the lowest precisions whose switch passed."""
        kind = self._machine.device.kind
        switches = {way.precision: way.key for way in first_ways(self._machine) if way.switch}
        for precision in LOWEST[kind]:
            seen = self.record.seen.get(switches[precision])
            if seen and seen.judgment and seen.judgment.passed:
                return precision
        return Precision.FP32

    def _measure(self, images: Images, seconds: float) -> None:
        """All ways in turn, round after round, each round beginning with another one."""
        each_s = seconds / ROUNDS
        todo = list(self._opened.values())
        total, done = seconds * len(todo), 0.0
        for number in range(ROUNDS):
            for index in range(len(todo)):
                way = todo[(index + number) % len(todo)]
                seen = self.record.seen[way.way.key]
                if all(each.number != number for each in seen.rounds):
                    self._report(Progress(doing=way.way.title, done_s=done, total_s=total))
                    found = way.measured(number, images.proven, each_s)
                    self._see(way.way, replace(seen, rounds=(*seen.rounds, found)))
                    figure = f"{way.way.title}: {found.per_second:.1f} images/s"
                    self._report(Progress(doing=way.way.title, done_s=done + each_s, total_s=total, figure=figure))
                done += each_s

    def _see(self, way: Way, seen: Seen) -> None:
        self.record = replace(self.record, seen={**self.record.seen, way.key: seen})
        self._keep()

    def _keep(self) -> None:
        self.record.write(self._path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """A way whose process (and server) runs."""

    way: Way
    worker: Worker
    pids: tuple[int, ...]

    def measured(self, number: int, jpegs: Sequence[bytes], seconds: float) -> Round:
        """One segment."""
        meter = Meter(*self.pids)
        before, begun = meter.cpu_s(), time.perf_counter()
        segment = self.worker.segment(jpegs, seconds)
        cores = (meter.cpu_s() - before) / (time.perf_counter() - begun)
        return Round(
            number=number,
            per_second=segment.per_second,
            latencies_ms=tuple(round(latency, 3) for latency in segment.latencies_ms),
            cores=cores,
            memory_mb=meter.memory_mb(),
        )


def _write_answers(folder: Path, answers: Answers) -> None:
    gradients = np.zeros(0) if answers.gradients is None else answers.gradients
    np.savez(folder / "reference.npz", scores=answers.scores, gradients=gradients, noise=np.float64(answers.noise))


def _read_answers(folder: Path) -> Answers:
    with np.load(folder / "reference.npz") as found:
        gradients = found["gradients"]
        return Answers(
            scores=found["scores"], gradients=gradients if gradients.size else None, noise=float(found["noise"])
        )
