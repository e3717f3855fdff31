"""`graphkiln tune` beside exhaustive and random search of the same space, and the default configuration.

On a simulated server, whose best configuration is known without noise, and with real models: MobileNetV3-small, whose
narrowed space is searched exhaustively, and three that were never used while the search was designed. All choices are
measured once more in turn, with other arrivals. Each part is saved when it is measured; an interrupted part continues
from its journals, and the table includes the rows of parts that were measured before.
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
from servers import PERF_ANALYZER, measure_rate
from simulated_server import SimulatedServer, simulated_space, true_rate

from graphkiln.story.server import start_server
from graphkiln.story.variants import machine_facts
from graphkiln.tuning.candidate import MAX_BATCH_SIZE, QUEUE_DELAY_US, SPIN, STREAMS, Candidate, changes_of
from graphkiln.tuning.contest import CandidateScore, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.local_trials import FLAGS, LocalTrials
from graphkiln.tuning.measure import Loading
from graphkiln.tuning.requests import read_requests
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search, probe
from graphkiln.tuning.space import Axis, Space, span_space
from graphkiln.tuning.subject import Subject, read_subject, stage, vanishing_cache
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import OpenLoop, Trials

OURS, RANDOM, EXHAUSTIVE, DEFAULT = "graphkiln tune", "random search", "exhaustive search", "default"
SIMULATED = "simulated"
COLUMNS = (
    "model", "set-up", "runs", "ratio", "least", "runs of 0.95", "requests/s", "promised/s", "perf_analyzer within p99",
    "budget s", "measured s", "measurements", "choice", "date",
)  # fmt: skip
PARTS = CACHE / "tune"  # saved parts, and the journals of their searches
KEPT = RESULTS / "tune.json"  # rows of the documentation

_SEEDS = 4  # of the simulated server in a round
_SIMULATED_TARGET, _SIMULATED_BUDGET_S, _SIMULATED_SHORTEST_S = Target(p99_s=0.05), 1200.0, 3.0
_SIMULATED_NOISE, _SIMULATED_CORES = 0.05, 4
_LONGEST = 4  # measurements of the other searches last at most so many times the shortest
_EXHAUSTIVE = 6  # budget of the exhaustive search in budgets of ours, which is to be faster by more than 5
_BATCH_SIZES = (1, 2, 8)
_REPEATS, _WARM_UP_S = 10, 2.0  # of perf_analyzer
_ENOUGH = 400  # requests of a repeat by perf_analyzer: with fewer, p99 is arbitrary

Row = dict[str, Any]
# Opens trials and their clock.
OpenTrials = Callable[[], AbstractContextManager[tuple[Trials, Callable[[], float]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model to tune.

    Attributes:
        architecture: Argument of `exported_graph`.
        p99_s: Target.
        budget_s: Budget of our search, and of the random one.
        is_held_out: Whether it was never used while the search was designed; it is not searched exhaustively.
    """

    architecture: str
    p99_s: float
    budget_s: float
    is_held_out: bool = True


# 100 ms and more where a run takes long: below, no configuration of two cores meets the target.
MODELS = {
    "mobilenet_v3_small": Model(architecture="mobilenet_v3_small", p99_s=0.05, budget_s=170.0, is_held_out=False),
    "squeezenet1_1": Model(architecture="squeezenet1_1", p99_s=0.05, budget_s=600.0),
    "regnet_y_400mf": Model(architecture="regnet_y_400mf", p99_s=0.1, budget_s=600.0),
    "vit_tiny": Model(architecture="timm:vit_tiny_patch16_224", p99_s=0.2, budget_s=600.0),
}


def benchmark_tune(rounds: int, seconds: float, only: str = "", budget_s: float = 0.0) -> list[Row]:
    """Measure the simulated server with four seeds a round, and each real model once.

    Args:
        rounds: Rounds of the simulated server.
        seconds: Seconds of the shortest measurement of all searches but ours.
        only: Measure this part again, and no other.
        budget_s: Budget of the search of each real model; 0 for its default.

    Returns:
        The rows of all parts; those that were not measured now as saved or documented.

    Raises:
        SystemExit: No part has this name.
    """
    parts = Parts(PARTS, rounds, seconds)
    models = {name: replace(model, budget_s=budget_s or model.budget_s) for name, model in MODELS.items()}
    files = {SIMULATED: SIMULATED, **{name: f"{name}-{model.budget_s:g}" for name, model in models.items()}}
    measures: dict[str, Callable[[], list[Row]]] = {
        SIMULATED: partial(_measure_simulated, rounds * _SEEDS),
        **{name: partial(_measure_real, name, model, PARTS / files[name], seconds) for name, model in models.items()},
    }
    if only and only not in measures:
        sys.exit(f"--only {only}: there is no such part; one of {', '.join(measures)}")
    for name in [only] if only else measures:
        if only and parts.read(files[name]) is not None:
            shutil.rmtree(PARTS / files[name], ignore_errors=True)
        parts.measure(files[name], measures[name], again=bool(only))
    show_progress("")
    documented: dict[str, list[Row]] = {}
    for row in json.loads(KEPT.read_text())["rows"] if KEPT.exists() else ():
        documented.setdefault(row["model"].partition(",")[0], []).append(row)
    rows = [row for name in measures for row in parts.read(files[name]) or documented.get(name, ())]
    return [{column: row.get(column, "-") for column in COLUMNS} for row in rows]  # older rows have fewer columns


# Searches of a space: ours, random within the same budget, exhaustive, and none. Each measures through a journal, so
# that an interrupted search continues.


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Parameters of all searches of a space.

    Attributes:
        open_trials: Opens what measures.
        space: The candidates.
        target: The target.
        budget_s: Seconds of measurements.
        cores: Cores of the machine.
        seed: Seed of arrivals and of random orders.
        shortest_s: Seconds of a measurement of the exhaustive and the random search.
        journals: Folder of the journals.
    """

    open_trials: OpenTrials
    space: Space
    target: Target
    budget_s: float
    cores: int
    seed: int
    shortest_s: float
    journals: Path

    @contextmanager
    def recorded(self, search: str) -> Iterator[RecordedTrials]:
        """Open trials that continue the journal of a search."""
        path = self.journals / f"{search.replace(' ', '_')}-{self.seed}.jsonl"
        identity = {
            "way": search,
            "target": str(self.target),
            "budget": str(self.budget_s),
            "shortest": self.shortest_s,
            "space": [each.id for each in self.space.candidates],
        }
        with Journal(path, identity) as journal, self.open_trials() as (trials, clock):
            yield RecordedTrials(trials, journal, clock)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Result of a search.

    Attributes:
        name: Name of the search.
        candidate: The configuration, or None.
        spent_s: Seconds of measurements.
        measurements: Number of measurements.
        promised: Requests per second that it promises, or None.
        budget_s: Its budget, or None for no limit.
    """

    name: str
    candidate: Candidate | None
    spent_s: float = 0.0
    measurements: int = 0
    promised: float | None = None
    budget_s: float | None = None


def tune(course: Course) -> Choice:
    """Search as `graphkiln tune` does, within the budget."""
    with course.recorded(OURS) as recorded:
        search = Search(
            course.space, course.target, recorded, budget_s=course.budget_s, cores=course.cores, seed=course.seed
        )
        show_progress(f"{OURS}: {course.budget_s:.0f} s")
        found = search.run()
    load = found.promise.load if found.promise else None
    return Choice(
        name=OURS,
        candidate=found.candidate or best_without_proof(found),
        spent_s=found.spent_s,
        measurements=found.measurements,
        promised=load.rate if isinstance(load, OpenLoop) else None,
        budget_s=course.budget_s,
    )


def best_without_proof(result: Result) -> Candidate | None:
    """The candidate with the highest rate if the budget was spent before a proof; other searches prove nothing."""
    reached = [row.scored for row in result.rows if row.scored.score.lower > 0]
    best = max(reached, key=lambda each: each.score.lower, default=None)
    return best.candidate if best else None


def search_at_random(course: Course) -> Choice:
    """The best of the candidates that the budget allows to measure exactly, in random order."""
    return _best_of(course, RANDOM)[0]


def search_exhaustively(course: Course, budget_s: float = math.inf) -> Choice:
    """The best of all candidates, or of those that a budget allows: then the name has their number."""
    choice, measured, viable = _best_of(replace(course, budget_s=budget_s), EXHAUSTIVE)
    name = EXHAUSTIVE if measured == viable else f"{EXHAUSTIVE}, {measured} of {viable}"
    return replace(choice, name=name)


def use_default(course: Course) -> Choice:
    """The default configuration."""
    return Choice(name=DEFAULT, candidate=course.space.default)


def measure_again(course: Course, candidates: Sequence[Candidate]) -> Mapping[Candidate, float]:
    """Measure the highest rate of each candidate within the target, with other arrivals than in the searches."""
    course = replace(course, seed=course.seed + 1, budget_s=math.inf)
    with course.recorded("judged") as recorded:
        return _rates(_settle(course, recorded, candidates))


def _best_of(course: Course, name: str) -> tuple[Choice, int, int]:
    """Choose the best; also return the numbers of measured and of all viable candidates."""
    with course.recorded(name) as recorded:
        viable = list(probe(course.space, course.target, recorded).viable)
        random.Random(course.seed).shuffle(viable)  # noqa: S311 - an order of measurements
        settled = list(_settle(course, recorded, viable))
        rates = _rates(settled)
        choice = Choice(
            name=name,
            candidate=max(rates, key=lambda each: rates[each], default=None),
            spent_s=recorded.spent_s,
            measurements=recorded.count,
            budget_s=None if math.isinf(course.budget_s) else course.budget_s,
        )
    return choice, len(settled), len(viable)


def _settle(course: Course, recorded: RecordedTrials, candidates: Sequence[Candidate]) -> Iterator[CandidateScore]:
    """Measure candidates, each until its rate is known, until the budget is spent."""
    reference = Reference(recorded, course.shortest_s, course.seed)
    contest = RateContest(reference, course.target, course.shortest_s, _LONGEST * course.shortest_s)
    for number, candidate in enumerate(candidates, 1):
        if recorded.spent_s >= course.budget_s:
            break
        show_progress(f"{number} of {len(candidates)}: {candidate}")
        yield contest.settle(contest.enter(candidate, math.inf), -math.inf)


def _rates(settled: Iterable[CandidateScore]) -> dict[Candidate, float]:
    """Rates of the candidates that met the target at any rate."""
    return {each.candidate: each.score.lower for each in settled if each.score.lower > 0}


# The simulated server.


def _measure_simulated(seeds: int) -> list[Row]:
    """Search with each seed, which changes arrivals and noise; exhaustively with the first one only."""
    space, clean = simulated_space(_SIMULATED_CORES), SimulatedServer(cores=_SIMULATED_CORES)
    p99_s = _SIMULATED_TARGET.p99_s
    best = 0.0
    correct = [each for each in space.candidates if str(each["precision"]) not in clean.model.wrong]
    for candidate in sorted(correct, key=clean.capacity, reverse=True):
        best = max(best, true_rate(clean, candidate, p99_s, more_than=best))

    @contextmanager
    def open_trials() -> Iterator[tuple[Trials, Callable[[], float]]]:
        server = SimulatedServer(cores=_SIMULATED_CORES, noise=_SIMULATED_NOISE)
        yield server, server.clock

    found: dict[str, list[tuple[Choice, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            course = Course(
                open_trials=open_trials,
                space=space,
                target=_SIMULATED_TARGET,
                budget_s=_SIMULATED_BUDGET_S,
                cores=_SIMULATED_CORES,
                seed=seed,
                shortest_s=_SIMULATED_SHORTEST_S,
                journals=Path(folder),
            )
            searches = [tune, search_at_random, use_default, *([search_exhaustively] if seed == 0 else [])]
            for search in searches:
                show_progress(f"simulated server, seed {seed + 1} of {seeds}")
                choice = search(course)
                rate = true_rate(clean, choice.candidate, p99_s) if choice.candidate else 0.0
                found.setdefault(choice.name, []).append((choice, rate / best))
    return [row_of(SIMULATED, each) for each in found.values()]


# Real models.


def _measure_real(name: str, model: Model, journals: Path, seconds: float) -> list[Row]:
    """Measure each search; rates are shares of the best that any of them found."""
    with tempfile.TemporaryDirectory() as folder, vanishing_cache() as cache:
        add_model(Path(folder), "model", exported_graph(model.architecture))
        subject = read_subject(Path(folder) / "model" / "1", cache)
        loading = Loading(requests=read_requests(subject), timeout_s=40 * model.p99_s)

        @contextmanager
        def open_trials() -> Iterator[tuple[Trials, Callable[[], float]]]:
            with LocalTrials(subject=subject, loading=loading, batch_sizes=_BATCH_SIZES) as local:
                yield local, time.monotonic

        course = Course(
            open_trials=open_trials,
            space=_narrow(span_space(subject, p99_s=model.p99_s)),
            target=Target(p99_s=model.p99_s),
            budget_s=model.budget_s,
            cores=subject.cores,
            seed=0,
            shortest_s=seconds,
            journals=journals,
        )
        found = [tune(course), search_at_random(course), use_default(course)]
        if not model.is_held_out:
            found.append(search_exhaustively(course, _EXHAUSTIVE * model.budget_s))
        rates = measure_again(course, list(dict.fromkeys(each.candidate for each in found if each.candidate)))
        kept = _check_promise(subject, found[0], model.p99_s, seconds)
    return real_rows(f"{name}, held out" if model.is_held_out else name, found, rates, kept)


def _narrow(space: Space) -> Space:
    """The part that can be searched exhaustively: engines, precisions, threads, instances, two batch sizes."""
    keys = {axis.key for axis in space.axes}
    fixed = space.fixed(
        {key: value for key, value in ((SPIN, False), (STREAMS, 1), (QUEUE_DELAY_US, 0)) if key in keys}
    )
    axes = (Axis(key=axis.key, values=(8, 2)) if axis.key == MAX_BATCH_SIZE else axis for axis in fixed.axes)
    return Space(axes=tuple(axes), constraints=fixed.constraints)


def _check_promise(subject: Subject, choice: Choice, p99_s: float, seconds: float) -> str:
    """Send Poisson arrivals at the promised rate by perf_analyzer.

    Returns:
        The number of repeats within p99; "-" without perf_analyzer or a promise.
    """
    if choice.candidate is None or choice.promised is None or not shutil.which(PERF_ANALYZER):
        return "-"
    length_s = max(2 * seconds, _ENOUGH / choice.promised)
    p99_ms = []
    changes = changes_of(choice.candidate, subject)
    with stage(subject, changes) as store, start_server(store, flags=FLAGS) as server:
        measure_rate(server.grpc_url, subject.name, choice.promised, _WARM_UP_S)
        for number in range(_REPEATS):
            show_progress(f"{PERF_ANALYZER} at {choice.promised:g} requests per second, {number + 1} of {_REPEATS}")
            p99_ms.append(measure_rate(server.grpc_url, subject.name, choice.promised, length_s).p99_ms)
    return f"{sum(each <= p99_s * 1e3 for each in p99_ms)} of {_REPEATS}"


def real_rows(title: str, found: Sequence[Choice], rates: Mapping[Candidate, float], kept: str) -> list[Row]:
    """Rows of choices; rates are compared with the best of them."""
    best = max(rates.values(), default=0.0)
    rows = []
    for choice in found:
        rate = rates.get(choice.candidate, 0.0) if choice.candidate else 0.0
        row = row_of(title, [(choice, rate / best if best else 0.0)])
        promised = kept if choice.name == OURS else "-"
        rows.append({**row, "requests/s": f"{rate:.1f}", "perf_analyzer within p99": promised})
    return rows


def row_of(title: str, found: Sequence[tuple[Choice, float]]) -> Row:
    """Row of one or several runs of a search, each with its share of the best rate."""
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
        "choice": str(choices[-1].candidate or "none"),
        "date": machine_facts()["date"].partition(" ")[0],  # parts of a table may be measured on different days
    }
