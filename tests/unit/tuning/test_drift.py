"""Detection of changes of the machine's speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.space import Space
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

MakeReference = Callable[..., Reference]


def work(reference: Reference, seconds: float = 60.0) -> Callable[[], float]:
    """Return a function that measures the throughput of the reference's candidate."""

    def measure() -> float:
        assert reference.candidate is not None
        outcome = reference.measure(reference.candidate, ClosedLoop(8), seconds)
        assert isinstance(outcome, Measured)
        return outcome.throughput.value

    return measure


class PacedServer(SimulatedServer):
    """A server with a given speed in each measurement, including warm-ups."""

    def __init__(self, *, paces: list[float], **more: Any) -> None:
        super().__init__(**more)
        self._paces = iter(paces)

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        pace = next(self._paces)
        self.speed = lambda _: pace
        return super().measure(candidate, load, seconds, seed)


def test_single_deviation_is_no_drift(reference_of: MakeReference, space: Space) -> None:
    """A second reading contradicts the first one, so that the work is not repeated."""
    server = PacedServer(cores=2, paces=[1, 1, 1, 0.8, 0.8, 1])
    reference = reference_of(server)
    reference.begin(space.candidates)
    reference.steadily(work(reference))
    assert [reading.level for reading in reference.readings] == pytest.approx([1, 0.8, 1], rel=0.02)
    assert (reference.level, reference.notes) == (1.0, [])
    assert len(server.measured) == 6


def test_noise_seldom_repeats_work(reference_of: MakeReference, space: Space) -> None:
    """Repeated measurements differ by 9%; a single reading would see drift in two of five cases."""
    repeated = 0
    for seed in range(5):
        reference = reference_of(SimulatedServer(cores=2, noise=0.2), seed)
        reference.begin(space.candidates)
        for _ in range(3):
            reference.steadily(work(reference, 50.0))
        repeated += sum("measured again" in note for note in reference.notes)
    assert repeated <= 3, "of 15 pieces of work"


class ColdServer(SimulatedServer):
    """A server that is slow in the first measurement of a configuration."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        served = [call[0] for call in self.measured[-1:]]
        pace = 1.0 if served == [candidate] else 0.7 if served else 0.5
        self.speed = lambda _: pace
        return super().measure(candidate, load, seconds, seed)


def test_cold_servers_are_no_drift(reference_of: MakeReference, space: Space) -> None:
    server = ColdServer(cores=2)
    reference = reference_of(server)
    reference.begin(space.candidates)

    def measure_another() -> None:
        for each in space.candidates[1:5]:
            reference.measure(each, ClosedLoop(8), 20.0)

    reference.steadily(measure_another)
    assert [reading.level for reading in reference.readings] == pytest.approx([1.0, 1.0])
    assert reference.notes == []


def test_results_of_slower_machine_are_converted(reference_of: MakeReference, space: Space) -> None:
    server = SimulatedServer(cores=2, speed=lambda now_s: 1.0 if now_s < 20 else 0.5)
    reference = reference_of(server)
    reference.begin(space.candidates)
    before = work(reference, 5.0)()
    reference.steadily(work(reference, 5.0))
    after = reference.steadily(work(reference))
    assert after == pytest.approx(before, rel=0.05)
    assert reference.level == pytest.approx(0.5, rel=0.05)
    assert "changed from 100% to 5" in reference.notes[0]
    assert reference.candidate is not None
    reference.measure(reference.candidate, OpenLoop(100.0), 5.0)
    offered = server.measured[-1][1]
    assert isinstance(offered, OpenLoop)
    assert offered.rate == pytest.approx(50, rel=0.05)


def test_fluctuating_machine_is_noted(reference_of: MakeReference, space: Space) -> None:
    """The machine changes its speed with each work, and keeps it for the readings."""
    server = PacedServer(cores=2, paces=[1, 1, 1, 0.5, 0.5, 0.5, 1, 0.7, 0.7, 0.7, 1, 1, 1, 1])
    reference = reference_of(server)
    reference.begin(space.candidates)
    reference.steadily(work(reference))
    assert "kept changing" in reference.notes[-1]
    assert [reading.level for reading in reference.readings] == pytest.approx([1, 0.5, 0.5, 0.7, 0.7], rel=0.02)


def test_failed_reference_is_noted(reference_of: MakeReference, space: Space) -> None:
    server = SimulatedServer(cores=2)
    reference = reference_of(server)
    reference.begin(space.candidates)
    server.fault = lambda each: "hang" if each == reference.candidate and len(server.measured) > 3 else ""
    reference.steadily(work(reference))
    assert "the reference failed" in reference.notes[0]


def test_result_is_kept_without_budget_for_a_repetition(reference_of: MakeReference, space: Space) -> None:
    reference = reference_of(SimulatedServer(cores=2, speed=lambda now_s: 1.0 if now_s < 20 else 0.5))
    reference.begin(space.candidates)
    measure = work(reference)
    reference.trials.budget.total_s = 150.0

    def if_affordable() -> float:
        assert reference.candidate is not None
        return measure() if reference.affords(reference.candidate, 60.0) else 0.0

    assert reference.steadily(if_affordable) > 0
    assert "there was no time to measure again" in reference.notes[-1]
