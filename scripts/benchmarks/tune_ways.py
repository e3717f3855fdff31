"""Ways to search a space: ours, random within the same budget, exhaustive, and not at all.

All of them measure through a journal of their own, so that one that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from measurement import show_progress

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.contest import RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.result import CandidateScore, Result
from graphkiln.tuning.search import Search, probe
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import OpenLoop, Trials

OURS, RANDOM, EXHAUSTIVE, DEFAULT = "graphkiln tune", "random search", "exhaustive search", "default"
_LONGEST = 4  # measurements of the other searches last at most so many times the shortest

# Opens whoever measures, and its clock.
OpenTrials = Callable[[], AbstractContextManager[tuple[Trials, Callable[[], float]]]]


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
    """What a way to search chose.

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
    """What `graphkiln tune` chooses within the budget."""
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
    """What reached the highest rate, where the budget was spent before it was proven; other searches prove nothing."""
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
    """What serves without a search."""
    return Choice(name=DEFAULT, candidate=course.space.default)


def _best_of(course: Course, name: str) -> tuple[Choice, int, int]:
    """What is chosen; how many candidates were measured, and of how many."""
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
    """Measures candidates, each until its rate is known, for as long as the budget lasts."""
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
