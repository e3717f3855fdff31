"""Searches of a simulated server, whose best configuration is known without noise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from measurement import show_progress
from simulated_server import SimulatedServer, simulated_space, true_rate
from tune_ways import Choice, Course, at_random, default, exhaustive, tuned

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Trials

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
                open_trials=_open_trials,
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
def _open_trials() -> Iterator[tuple[Trials, Callable[[], float]]]:
    server = SimulatedServer(cores=_CORES, noise=_NOISE)
    yield server, server.clock
