"""Searches on a simulated server, whose best configuration is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from digits_subject import digits_subject
from simulated_server import SimulatedServer, simulated_space, true_rate

from graphkiln.tuning.candidate import ENGINE, PRECISION
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.requests import Requests, read_requests
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search
from graphkiln.tuning.space import Space
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Target

CORES = 2
P99_S = 0.08

Tune = Callable[..., Result]


@pytest.fixture(scope="session")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


@pytest.fixture(scope="session")
def requests(repository: Path) -> Requests:
    """The golden samples of the subject."""
    return read_requests(digits_subject(repository))


@pytest.fixture(scope="session")
def space() -> Space:
    return simulated_space(CORES)


@pytest.fixture(scope="session")
def small(space: Space) -> Space:
    """A part of the space that contains the best, for quick searches."""
    return space.fixed({ENGINE: "openvino"})


@pytest.fixture(scope="session")
def tiny(small: Space) -> Space:
    """An even smaller part, for tests that do not check the choice."""
    return small.fixed({PRECISION: "bf16"})


@pytest.fixture(scope="session")
def best_rate(space: Space) -> float:
    """The highest rate of all candidates, by exhaustive search without noise."""
    server = SimulatedServer(cores=CORES)
    right = [each for each in space.candidates if each[PRECISION] not in server.model.wrong]
    best = 0.0
    for candidate in sorted(right, key=server.capacity, reverse=True):
        best = max(best, true_rate(server, candidate, P99_S, more_than=best))
    return best


@pytest.fixture
def tune(tmp_path: Path, small: Space) -> Tune:
    """Run searches with a journal; another call with the same file continues."""

    def run(
        server: SimulatedServer,
        *,
        target: Target | None = None,
        within: Space | None = None,
        budget_s: float = 600.0,
        seed: int = 0,
        file: str = "journal",
    ) -> Result:
        goal = target or Target(p99_s=P99_S)
        with Journal(tmp_path / file, {"target": str(goal), "seed": seed}) as journal:
            trials = RecordedTrials(server, journal, server.clock)
            server.now_s = sum(event.get("took_s", 0.0) for event in journal.events)
            search = Search(within or small, goal, trials, budget_s=budget_s, cores=CORES, seed=seed)
            return search.run()

    return run


@pytest.fixture
def reference_of(tmp_path: Path) -> Callable[..., Reference]:
    """Create references on a simulated server with a journal."""

    def make(server: SimulatedServer, seed: int = 0) -> Reference:
        journal = Journal(tmp_path / f"{len(opened)}.journal", {})
        opened.append(journal)
        return Reference(RecordedTrials(server, journal, server.clock), seconds=2.0, seed=seed)

    opened: list[Journal] = []
    yield make  # type: ignore[misc]
    for journal in opened:
        journal.__exit__()
