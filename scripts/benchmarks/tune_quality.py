"""What `graphkiln tune` finds, beside exhaustive and random search of the same space, and the default configuration.

On a simulated server first, whose best configuration is known without noise; then MobileNetV3-small on a real one.
There the exhaustive search measures what each choice is worth: the highest rate at which its p99 is within the target,
so that all ratios are to the best of one and the same pass.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from inputs import exported_graph
from measurement import show_progress
from simulated_server import SimulatedServer, simulated_space, true_rate
from stores import add_model

from graphkiln.tuning.candidate import MAX_BATCH_SIZE, QUEUE_DELAY_US, SPIN, STREAMS, Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.model_space import span_space
from graphkiln.tuning.questions import read_questions
from graphkiln.tuning.rate_contest import RateContest
from graphkiln.tuning.recording import RecordedTrials
from graphkiln.tuning.search import Search
from graphkiln.tuning.served_candidate import Loading
from graphkiln.tuning.shortlist import probe
from graphkiln.tuning.space import Axis, Space
from graphkiln.tuning.standing import Standing
from graphkiln.tuning.subject import read_subject, vanishing_cache
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Trials
from graphkiln_backend.graph.cores import usable_cores

_SIMULATED = Target(p99_s=0.05)
_SIMULATED_BUDGET_S, _SEEDS = 1200.0, 4
_REAL = Target(p99_s=0.05)
_BUDGET_S = 240.0
"""Of our search and of the random one: together with the exhaustive search, 25 minutes on two cores."""
_SHORTEST_S, _LONGEST_S = 3.0, 30.0
"""Of one measurement of the exhaustive and the random search."""
_NOISE, _CORES = 0.05, 4


OpenTrials = Callable[[], AbstractContextManager[tuple[Trials, Callable[[], float]]]]
"""Opens whoever measures, and its clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What all ways to search are given.

    Attributes:
        open_trials: What measures.
        space: What may be chosen.
        target: What must be met.
        budget_s: Seconds of measurements.
        cores: Of the machine.
        seed: Of arrivals and of random orders.
    """

    open_trials: OpenTrials
    space: Space
    target: Target
    budget_s: float
    cores: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a way to search chose.

    Attributes:
        name: Of the way.
        candidate: The configuration; None for none.
        spent_s: Seconds that it measured.
        measurements: How many it made.
    """

    name: str
    candidate: Candidate | None
    spent_s: float
    measurements: int


def benchmark_tune(rounds: int, seconds: float) -> list[dict[str, object]]:
    """The simulated server with four seeds a round, then the real one, once a round."""
    rows = _simulated_rows(rounds * _SEEDS)
    choices: dict[str, list[tuple[Choice, float]]] = {}
    for number in range(rounds):
        for choice, share in _real_round(number, seconds):
            choices.setdefault(choice.name, []).append((choice, share))
    show_progress("")
    return [*rows, *(_row("mobilenet_v3_small", name, found) for name, found in choices.items())]


def _simulated_rows(seeds: int) -> list[dict[str, object]]:
    space, clean = simulated_space(_CORES), SimulatedServer(cores=_CORES)
    right = [each for each in space.candidates if str(each["precision"]) not in clean.model.wrong]
    best = 0.0
    for candidate in sorted(right, key=clean.capacity, reverse=True):
        best = max(best, true_rate(clean, candidate, _SIMULATED.p99_s, more_than=best))
    found: dict[str, list[tuple[Choice, float]]] = {}
    for seed in range(seeds):
        show_progress(f"simulated server, seed {seed + 1} of {seeds}")
        course = Course(
            open_trials=_simulated_trials,
            space=space,
            target=_SIMULATED,
            budget_s=_SIMULATED_BUDGET_S,
            cores=_CORES,
            seed=seed,
        )
        for choice in _ways(course):
            share = true_rate(clean, choice.candidate, _SIMULATED.p99_s) / best if choice.candidate else 0.0
            found.setdefault(choice.name, []).append((choice, share))
    return [_row("simulated", name, each) for name, each in found.items()]


def _real_round(seed: int, seconds: float) -> Iterator[tuple[Choice, float]]:
    """Each way once, and its choice's rate as a share of the best that the exhaustive search found."""
    with tempfile.TemporaryDirectory() as folder, vanishing_cache() as cache:
        add_model(Path(folder), "mobilenet", exported_graph("mobilenet_v3_small"))
        subject = read_subject(Path(folder) / "mobilenet" / "1", cache)
        questions, space = read_questions(subject), _narrow(span_space(subject, p99_s=_REAL.p99_s).space)

        @contextmanager
        def open_trials() -> Iterator[tuple[Trials, Callable[[], float]]]:
            loading = Loading(questions=questions, timeout_s=40 * _REAL.p99_s)
            with LocalTrials(subject=subject, loading=loading, batch_sizes=(1, 2, 8)) as local:
                yield local, time.monotonic

        course = Course(
            open_trials=open_trials, space=space, target=_REAL, budget_s=_BUDGET_S, cores=usable_cores(), seed=seed
        )
        with _recorded(course) as recorded:
            settled = _settle_all(recorded, replace(course, budget_s=float("inf")), max(seconds, _SHORTEST_S))
            exhaustive = _best("exhaustive search", settled, recorded)
        rates = {each.candidate: each.score.lower for each in settled}
        best = max(rates.values(), default=0.0)
        for choice in (exhaustive, *_ways(course)):
            yield choice, rates.get(choice.candidate, 0.0) / best if choice.candidate and best else 0.0


def _narrow(space: Space) -> Space:
    """The part that can be searched exhaustively: engines, precisions, threads, instances, two batch sizes."""
    keys = {axis.key for axis in space.axes}
    kept = space.fixed({key: value for key, value in ((SPIN, False), (STREAMS, 1), (QUEUE_DELAY_US, 0)) if key in keys})
    axes = (Axis(key=axis.key, values=(8, 2)) if axis.key == MAX_BATCH_SIZE else axis for axis in kept.axes)
    return Space(axes=tuple(axes), constraints=kept.constraints)


@contextmanager
def _simulated_trials() -> Iterator[tuple[Trials, Callable[[], float]]]:
    server = SimulatedServer(cores=_CORES, noise=_NOISE)
    yield server, server.clock


def _ways(course: Course) -> Iterator[Choice]:
    with _recorded(course) as recorded:
        search = Search(
            course.space, course.target, recorded, budget_s=course.budget_s, cores=course.cores, seed=course.seed
        )
        found = search.run()
        name, spent_s, count = "graphkiln tune", found.spent_s, found.measurements
        yield Choice(name=name, candidate=found.candidate, spent_s=spent_s, measurements=count)
    with _recorded(course) as recorded:
        yield _best("random search", _settle_all(recorded, course, _SHORTEST_S), recorded)
    yield Choice(name="default", candidate=course.space.default, spent_s=0.0, measurements=0)


@contextmanager
def _recorded(course: Course) -> Iterator[RecordedTrials]:
    """Trials with a journal that vanishes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal", {"seed": course.seed}) as journal,
        course.open_trials() as (trials, clock),
    ):
        yield RecordedTrials(trials, journal, clock)


def _settle_all(recorded: RecordedTrials, course: Course, shortest_s: float) -> list[Standing]:
    """Measures candidates in random order, each until its rate is known, for as long as the budget lasts."""
    viable = list(probe(course.space, course.target, recorded).viable)
    random.Random(course.seed).shuffle(viable)  # noqa: S311 - an order of measurements
    contest = RateContest(Reference(recorded, shortest_s, course.seed), course.target, shortest_s, _LONGEST_S)
    settled = []
    for number, candidate in enumerate(viable):
        if recorded.spent_s >= course.budget_s:
            break
        show_progress(f"{number + 1} of {len(viable)}: {candidate}")
        settled.append(contest.settle(contest.enter(candidate, float("inf")), float("-inf")))
    return settled


def _best(name: str, settled: Sequence[Standing], recorded: RecordedTrials) -> Choice:
    best = max((each for each in settled if each.score.lower > 0), key=lambda each: each.score.lower, default=None)
    return Choice(
        name=name,
        candidate=best.candidate if best else None,
        spent_s=recorded.spent_s,
        measurements=recorded.count,
    )


def _row(model: str, name: str, found: Sequence[tuple[Choice, float]]) -> dict[str, object]:
    shares = [share for _, share in found]
    chosen = found[-1][0].candidate
    return {
        "model": model,
        "set-up": name,
        "runs": len(found),
        "ratio": round(statistics.median(shares), 3),
        "least": round(min(shares), 3),
        "runs of 0.95": sum(share >= 0.95 for share in shares),
        "measured s": round(statistics.median(choice.spent_s for choice, _ in found)),
        "measurements": round(statistics.median(choice.measurements for choice, _ in found)),
        "choice": str(chosen) if chosen else "none",
    }
