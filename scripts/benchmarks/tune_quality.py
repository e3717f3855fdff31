"""`graphkiln tune` beside exhaustive and random search of the same space, and the default configuration.

On a simulated server, whose best configuration is known without noise, and with real models: MobileNetV3-small, whose
narrowed space is searched exhaustively, and three that were never used while the search was designed. What is chosen
for each is measured once more in turn, with other arrivals. Each part is kept as soon as it is done, and what was
interrupted within a part goes on where it was; a table that is kept holds the rows of parts that were measured before.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inputs import CACHE, add_model, exported_graph
from measurement import show_progress
from reporting import RESULTS, Parts
from servers import PERF_ANALYZER, PerfAnalyzer
from simulated_server import SimulatedServer, simulated_space, true_rate

from graphkiln.story.server import start_server
from graphkiln.story.variants import machine_facts
from graphkiln.tuning.candidate import MAX_BATCH_SIZE, QUEUE_DELAY_US, SPIN, STREAMS, Candidate, changes_of
from graphkiln.tuning.contest import CandidateScore, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.local_trials import FLAGS, LocalTrials
from graphkiln.tuning.measure import Loading
from graphkiln.tuning.questions import Questions, read_questions
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search, probe
from graphkiln.tuning.space import Axis, Space, span_space
from graphkiln.tuning.subject import Subject, read_subject, stage, vanishing_cache
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import OpenLoop, Trials

# Ways to search a space: ours, random within the same budget, exhaustive, and not at all.
#
# All of them measure through a journal of their own, so that one that was interrupted goes on where it was.

OURS, RANDOM, EXHAUSTIVE, DEFAULT = "graphkiln tune", "random search", "exhaustive search", "default"
_LONGEST = 4  # measurements of the other searches last at most so many times the shortest

# Opens trials and their clock.
OpenTrials = Callable[[], AbstractContextManager[tuple[Trials, Callable[[], float]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Parameters of all ways to search.

    Attributes:
        open_trials: What measures.
        space: What may be chosen.
        target: What must be met.
        budget_s: Seconds of measurements.
        cores: Of the machine.
        seed: Of arrivals and of random orders.
        shortest_s: Of one measurement of the exhaustive and the random search.
        journals: Where journals are kept.
    """

    open_trials: OpenTrials
    space: Space
    target: Target
    budget_s: float
    cores: int
    seed: int
    shortest_s: float
    journals: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Choice of a way to search.

    Attributes:
        name: Of the way.
        candidate: The configuration; None for none.
        spent_s: Seconds that it measured.
        measurements: How many it made.
        promised: Requests per second that it promises; None where it promises nothing.
        budget_s: What it was given; None where it needed none, or took what it needed.
        note: Why it chose nothing; empty where it did, or where that is all there is to say.
    """

    name: str
    candidate: Candidate | None
    spent_s: float = 0.0
    measurements: int = 0
    promised: float | None = None
    budget_s: float | None = None
    note: str = ""


def tuned(course: Course) -> Choice:
    """Search as `graphkiln tune` does, within the budget."""
    with _recorded(course, OURS) as recorded:
        search = Search(
            course.space, course.target, recorded, budget_s=course.budget_s, cores=course.cores, seed=course.seed
        )
        show_progress(f"{OURS}: {course.budget_s:.0f} s")
        found = search.run()
        load = found.promise.load if found.promise else None
        return Choice(
            name=OURS,
            candidate=found.candidate or found_without_proof(found),
            spent_s=found.spent_s,
            measurements=found.measurements,
            promised=load.rate if isinstance(load, OpenLoop) else None,
            budget_s=course.budget_s,
        )


def found_without_proof(result: Result) -> Candidate | None:
    """The candidate with the highest rate if the budget was spent before a proof; other searches prove nothing."""
    reached = [row.scored for row in result.rows if row.scored.score.lower > 0]
    best = max(reached, key=lambda each: each.score.lower, default=None)
    return best.candidate if best else None


def at_random(course: Course) -> Choice:
    """The best of the candidates that the budget allows to measure exactly, in random order."""
    return _best_of(course, RANDOM)[0]


def exhaustive(course: Course, budget_s: float = math.inf) -> Choice:
    """The best of all candidates; of those that a budget allows, where there is one, and its name says how many."""
    choice, measured, viable = _best_of(replace(course, budget_s=budget_s), EXHAUSTIVE)
    name = EXHAUSTIVE if measured == viable else f"{EXHAUSTIVE}, {measured} of {viable}"
    return replace(choice, name=name)


def judged(course: Course, candidates: Sequence[Candidate]) -> Mapping[Candidate, float]:
    """The highest rate at which each of some candidates meets the target, with other arrivals than the searches had."""
    course = replace(course, seed=course.seed + 1, budget_s=math.inf)
    with _recorded(course, "judged") as recorded:
        return _rates(_settle(course, recorded, candidates))


def default(course: Course) -> Choice:
    """The default configuration."""
    return Choice(name=DEFAULT, candidate=course.space.default)


def _best_of(course: Course, name: str) -> tuple[Choice, int, int]:
    """Choose the best; also return how many candidates were measured, and of how many."""
    with _recorded(course, name) as recorded:
        viable = list(probe(course.space, course.target, recorded).viable)
        random.Random(course.seed).shuffle(viable)  # noqa: S311 - an order of measurements
        settled = list(_settle(course, recorded, viable))
        rates = _rates(settled)
        best = max(rates, key=lambda each: rates[each], default=None)
        choice = Choice(
            name=name,
            candidate=best,
            spent_s=recorded.spent_s,
            measurements=recorded.count,
            budget_s=None if math.isinf(course.budget_s) else course.budget_s,
        )
    return choice, len(settled), len(viable)


def _settle(course: Course, recorded: RecordedTrials, candidates: Sequence[Candidate]) -> Iterator[CandidateScore]:
    """Measure candidates, each until its rate is known, for as long as the budget lasts."""
    reference, longest_s = Reference(recorded, course.shortest_s, course.seed), _LONGEST * course.shortest_s
    contest = RateContest(reference, course.target, course.shortest_s, longest_s)
    for number, candidate in enumerate(candidates, 1):
        if recorded.spent_s >= course.budget_s:
            break
        show_progress(f"{number} of {len(candidates)}: {candidate}")
        yield contest.settle(contest.enter(candidate, math.inf), -math.inf)


def _rates(settled: Iterable[CandidateScore]) -> dict[Candidate, float]:
    """Those that met the target at any rate."""
    return {each.candidate: each.score.lower for each in settled if each.score.lower > 0}


@contextmanager
def _recorded(course: Course, name: str) -> Iterator[RecordedTrials]:
    path = course.journals / f"{name.replace(' ', '_')}-{course.seed}.jsonl"
    identity = {
        "way": name,
        "target": str(course.target),
        "budget": str(course.budget_s),
        "shortest": course.shortest_s,
        "space": [each.id for each in course.space.candidates],
    }
    with Journal(path, identity) as journal, course.open_trials() as (trials, clock):
        yield RecordedTrials(trials, journal, clock)


# Searches of a simulated server, whose best configuration is known without noise.

_TARGET = Target(p99_s=0.05)
_BUDGET_S, _SHORTEST_S = 1200.0, 3.0
_NOISE, _CORES = 0.05, 4
_WAYS = (tuned, at_random, default)

Judged = tuple[Choice, float]  # A choice, and its highest rate as a share of the best


def simulated_choices(seeds: int) -> Iterator[Judged]:
    """The choices of all ways, each seed with other arrivals and noise; the exhaustive search of the first one only."""
    space, clean = simulated_space(_CORES), SimulatedServer(cores=_CORES)
    best = _best_rate()

    def share(candidate: Candidate | None) -> float:
        return true_rate(clean, candidate, _TARGET.p99_s) / best if candidate else 0.0

    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            course = Course(
                open_trials=_open_simulated,
                space=space,
                target=_TARGET,
                budget_s=_BUDGET_S,
                cores=_CORES,
                seed=seed,
                shortest_s=_SHORTEST_S,
                journals=Path(folder),
            )
            ways = [way(course) for way in _WAYS]
            show_progress(f"simulated server, seed {seed + 1} of {seeds}")
            for choice in (*ways, *([exhaustive(course)] if seed == 0 else [])):
                yield choice, share(choice.candidate)


def _best_rate() -> float:
    """Of all candidates whose outputs are right."""
    clean, best = SimulatedServer(cores=_CORES), 0.0
    right = [each for each in simulated_space(_CORES).candidates if str(each["precision"]) not in clean.model.wrong]
    for candidate in sorted(right, key=clean.capacity, reverse=True):
        best = max(best, true_rate(clean, candidate, _TARGET.p99_s, more_than=best))
    return best


@contextmanager
def _open_simulated() -> Iterator[tuple[Trials, Callable[[], float]]]:
    server = SimulatedServer(cores=_CORES, noise=_NOISE)
    yield server, server.clock


REPEATS = 10
_WARM_UP_S = 2.0


def measure_again(subject: Subject, candidate: Candidate, rate: float, p99_s: float, seconds: float) -> str:
    """Send Poisson arrivals at a promised rate by perf_analyzer; how many repeats are within p99, "-" without it."""
    if not shutil.which(PERF_ANALYZER):
        return "-"
    generator, p99_ms = PerfAnalyzer(), []
    with stage(subject, changes_of(candidate, subject)) as store, start_server(store, flags=FLAGS) as server:
        generator.at_rate(server.grpc_url, subject.name, rate, _WARM_UP_S)
        for number in range(REPEATS):
            show_progress(f"{PERF_ANALYZER} at {rate:g} requests per second, {number + 1} of {REPEATS}")
            p99_ms.append(generator.at_rate(server.grpc_url, subject.name, rate, seconds).p99_ms)
    return f"{sum(each <= p99_s * 1e3 for each in p99_ms)} of {REPEATS}"


PARTS = CACHE / "tune"  # where each part is kept, and the journals of its searches
KEPT = RESULTS / "tune.json"  # rows of the documentation
SIMULATED = "simulated"
_SEEDS = 4
# The exhaustive search may take so many times the budget of ours: one more than ours is to be faster by.
_EXHAUSTIVE = 6
_BATCH_SIZES = (1, 2, 8)
_ENOUGH = 400  # requests of a repeat by perf_analyzer: of fewer, p99 is a matter of luck

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that is tuned.

    Attributes:
        architecture: As `exported_graph` takes it.
        p99_s: The target.
        budget_s: Of our search, and of the random one.
        is_held_out: Whether it was never used while the search was designed; such a one is not searched exhaustively.
    """

    architecture: str
    p99_s: float
    budget_s: float
    is_held_out: bool = True


# With 100 ms and more where a run takes long: below, no configuration of two cores meets the target.
MODELS = {
    "mobilenet_v3_small": Model(architecture="mobilenet_v3_small", p99_s=0.05, budget_s=170.0, is_held_out=False),
    "squeezenet1_1": Model(architecture="squeezenet1_1", p99_s=0.05, budget_s=600.0),
    "regnet_y_400mf": Model(architecture="regnet_y_400mf", p99_s=0.1, budget_s=600.0),
    "vit_tiny": Model(architecture="timm:vit_tiny_patch16_224", p99_s=0.2, budget_s=600.0),
}


def benchmark_tune(rounds: int, seconds: float, only: str = "", budget_s: float = 0.0) -> list[Row]:
    """The simulated server with four seeds a round, then each real model once.

    Args:
        rounds: Of the simulated server.
        seconds: Of the shortest measurement of all searches but ours.
        only: Measure this part, also where it is done, and no other.
        budget_s: Of the search of each real model; 0 for what suits it.

    Returns:
        The rows of all parts: those that were not measured now as they stand in the documentation.

    Raises:
        SystemExit: No part has this name.
    """
    parts = Parts(PARTS, rounds, seconds)
    models = {name: replace(model, budget_s=budget_s or model.budget_s) for name, model in MODELS.items()}
    files = {SIMULATED: SIMULATED, **{name: f"{name}-{model.budget_s:g}" for name, model in models.items()}}
    measures: dict[str, Callable[[], list[Row]]] = {
        SIMULATED: partial(_simulated, rounds * _SEEDS),
        **{name: partial(_real, name, model, PARTS / files[name], seconds) for name, model in models.items()},
    }
    if only and only not in measures:
        sys.exit(f"--only {only}: there is no such part; one of {', '.join(measures)}")
    for name in [only] if only else measures:
        if only and parts.read(files[name]) is not None:
            shutil.rmtree(PARTS / files[name], ignore_errors=True)
        parts.measure(files[name], measures[name], again=bool(only))
    show_progress("")
    kept = rows_by_part(KEPT)
    return [as_row(row) for name in measures for row in parts.read(files[name]) or kept.get(name, ())]


def rows_by_part(path: Path) -> dict[str, list[Row]]:
    """The rows of a result that was kept, by the model that they are of; none where there is no result."""
    found: dict[str, list[Row]] = {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        found.setdefault(row["model"].partition(",")[0], []).append(row)
    return found


def as_row(row: Row) -> Row:
    """A row with all columns: one that was kept before there was a column says nothing there."""
    return {column: row.get(column, "-") for column in COLUMNS}


def dated(row: Row) -> Row:
    """A row with the day of its measurement: rows of a table need not be of the same."""
    return {**row, "date": machine_facts()["date"].partition(" ")[0]}


def _simulated(seeds: int) -> list[Row]:
    found: dict[str, list[tuple[Choice, float]]] = {}
    for choice, share in simulated_choices(seeds):
        found.setdefault(choice.name, []).append((choice, share))
    return [dated(row_of(SIMULATED, each)) for each in found.values()]


def _real(name: str, model: Model, journals: Path, seconds: float) -> list[Row]:
    """A row for each way, its rate as a share of the best that any of them found."""
    with _opened(model, journals, seconds) as (course, subject):
        found = [tuned(course), at_random(course), default(course)]
        if not model.is_held_out:
            found.append(exhaustive(course, _EXHAUSTIVE * model.budget_s))
        rates = judged(course, list(dict.fromkeys(each.candidate for each in found if each.candidate)))
        held = _promise(subject, model, found[0], seconds)
    title = f"{name}, held out" if model.is_held_out else name
    return [dated(row) for row in real_rows(title, found, rates, held)]


def real_rows(title: str, found: Sequence[Choice], rates: Mapping[Candidate, float], held: str) -> list[Row]:
    """Rows of what was chosen; rates are compared with the best of all that were measured."""
    best = max(rates.values(), default=0.0)
    rows = []
    for choice in found:
        if choice.note and not choice.candidate:  # nothing was compared
            rows.append({**row_of(title, [(choice, 0.0)]), "ratio": "-", "least": "-", "runs of 0.95": "-"})
            continue
        rate = rates.get(choice.candidate, 0.0) if choice.candidate else 0.0
        row = row_of(title, [(choice, rate / best if best else 0.0)])
        promised = held if choice.name == OURS else "-"
        rows.append({**row, "requests/s": f"{rate:.1f}", "perf_analyzer within p99": promised})
    return rows


# Of every row.
COLUMNS = (
    "model", "set-up", "runs", "ratio", "least", "runs of 0.95", "requests/s", "promised/s", "perf_analyzer within p99",
    "budget s", "measured s", "measurements", "choice", "date",
)  # fmt: skip


def row_of(title: str, found: Sequence[tuple[Choice, float]]) -> Row:
    """A row of a way that was gone once or several times."""
    shares, choices = [share for _, share in found], [choice for choice, _ in found]
    promised = [choice.promised for choice in choices if choice.promised]
    budgets = [f"{choice.budget_s:.0f}" for choice in choices if choice.budget_s]
    return {
        "model": title,
        "set-up": choices[0].name,
        "runs": len(found),
        "ratio": round(statistics.median(shares), 3),
        "least": round(min(shares), 3),
        "runs of 0.95": sum(share >= 0.95 for share in shares),
        "requests/s": "-",
        "promised/s": f"{statistics.median(promised):.1f}" if promised else "-",
        "perf_analyzer within p99": "-",
        "budget s": budgets[0] if budgets else "-",
        "measured s": round(statistics.median(choice.spent_s for choice in choices)),
        "measurements": round(statistics.median(choice.measurements for choice in choices)),
        "choice": str(choices[-1].candidate or choices[-1].note or "none"),
    }


def _promise(subject: Subject, model: Model, ours: Choice, seconds: float) -> str:
    if ours.candidate is None or ours.promised is None:
        return "-"
    enough_s = max(2 * seconds, _ENOUGH / ours.promised)
    return measure_again(subject, ours.candidate, ours.promised, model.p99_s, enough_s)


@contextmanager
def _opened(model: Model, journals: Path, seconds: float) -> Iterator[tuple[Course, Subject]]:
    with tempfile.TemporaryDirectory() as folder, vanishing_cache() as cache:
        add_model(Path(folder), "model", exported_graph(model.architecture))
        subject = read_subject(Path(folder) / "model" / "1", cache)
        questions = read_questions(subject)
        yield (
            Course(
                open_trials=partial(_open_trials, subject, questions, 40 * model.p99_s),
                space=_narrow(span_space(subject, p99_s=model.p99_s)),
                target=Target(p99_s=model.p99_s),
                budget_s=model.budget_s,
                cores=subject.cores,
                seed=0,
                shortest_s=seconds,
                journals=journals,
            ),
            subject,
        )


@contextmanager
def _open_trials(
    subject: Subject, questions: Questions, timeout_s: float
) -> Iterator[tuple[Trials, Callable[[], float]]]:
    loading = Loading(questions=questions, timeout_s=timeout_s)
    with LocalTrials(subject=subject, loading=loading, batch_sizes=_BATCH_SIZES) as local:
        yield local, time.monotonic


def _narrow(space: Space) -> Space:
    """The part that can be searched exhaustively: engines, precisions, threads, instances, two batch sizes."""
    keys = {axis.key for axis in space.axes}
    kept = space.fixed({key: value for key, value in ((SPIN, False), (STREAMS, 1), (QUEUE_DELAY_US, 0)) if key in keys})
    axes = (Axis(key=axis.key, values=(8, 2)) if axis.key == MAX_BATCH_SIZE else axis for axis in kept.axes)
    return Space(axes=tuple(axes), constraints=kept.constraints)
