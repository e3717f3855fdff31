"""The search with impossible targets, faulty candidates and a disturbed machine."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from simulated_server import SimulatedServer, true_rate
from tuned import only

from graphkiln.tuning.candidate import MAX_BATCH_SIZE, PRECISION, QUEUE_DELAY_US, Candidate
from graphkiln.tuning.result import Result
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Failed, LoadShape, Measured, SessionTiming

CORES, P99_S = 2, 0.08
AT_60 = Target(p99_s=P99_S, rate=60.0, objective=Objective.LATENCY)
TARGETS = {"rate": Target(p99_s=P99_S), "load": AT_60}


@pytest.mark.parametrize(("budget_s", "target"), [(1, TARGETS["rate"]), (40, TARGETS["load"])])
def test_short_budget_reports_the_best_unconfirmed(tune, tiny: Space, budget_s: float, target: Target) -> None:
    """At least one configuration is measured and confirmed, even after the end of the budget."""
    server = SimulatedServer(cores=CORES, noise=0.05)
    result: Result = tune(server, within=tiny, target=target, budget_s=budget_s)
    assert result.spent_s <= max(budget_s, 5) + 35
    if result.candidate is None:
        assert result.closest is not None
        assert any("a larger --budget" in note for note in result.notes)
        lowest = [row.scored.score.lower for row in result.rows]
        assert result.is_unproven is any(math.isfinite(each) and each != 0 for each in lowest)
    if result.spent_s > budget_s:
        assert any("was overrun by" in note for note in result.notes)


def test_unconfirmed_candidate_is_reported(tune, tiny: Space) -> None:
    """Strongly correlated requests: no bound is within the target."""

    class Together(SimulatedServer):
        def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
            found = super().measure(candidate, load, seconds, seed)
            assert isinstance(found, Measured)
            p99 = replace(found.latency.p99, upper=1.0)
            return replace(found, latency=replace(found.latency, p99=p99, p99_wide_s=1.0))

    result: Result = tune(Together(cores=CORES), within=tiny, budget_s=300)
    assert result.candidate is None
    assert result.is_unproven
    assert result.closest.scored.score.lower == max(row.scored.score.lower for row in result.rows)
    assert "too few to confirm" in result.closest.scored.lost


def test_hanging_candidates_keep_the_budget(tune, small: Space) -> None:
    """Each candidate times out after 20 s."""
    server = SimulatedServer(cores=CORES, fault=lambda _: "hang")
    result: Result = tune(server, budget_s=70)
    assert result.spent_s <= 70 + 3 * 20
    assert len({call[0] for call in server.measured}) == len(server.measured), "none is tried twice"
    assert any("overrun" in note for note in result.notes)
    untried = [each for each in result.exclusions if each.by_budget]
    assert len(untried) > len(small.candidates) / 2


def test_rate_just_above_capacity_reports_answered_rate(tune, tiny: Space) -> None:
    """The sessions' times do not rule the rate out: instances that share cores slow each other down."""
    rate = 1.25 * max(SimulatedServer(cores=CORES).capacity(each) for each in tiny.candidates)
    result: Result = tune(SimulatedServer(cores=CORES), within=tiny, target=replace(AT_60, rate=rate), budget_s=400)
    assert result.candidate is None
    assert not result.is_unproven
    assert result.closest.limit.startswith(("throughput: ", "errors: "))


@pytest.mark.slow
def test_promise_accounts_for_slow_inputs(tune, tiny: Space) -> None:
    """Every fourth run takes four times as long; sessions are timed with fast inputs."""
    inputs = (1.0, 1.0, 1.0, 4.0)
    result: Result = tune(SimulatedServer(cores=CORES, noise=0.02, inputs=inputs), within=tiny, budget_s=600)
    again = SimulatedServer(cores=CORES, inputs=inputs).measure(result.candidate, result.promise.load, 200.0, 5)
    assert isinstance(again, Measured)
    assert again.latency.p99.value <= P99_S * 1.05
    fast = true_rate(SimulatedServer(cores=CORES), result.candidate, P99_S)
    assert result.promise.load.rate < 0.8 * fast


class SlowToBuild(SimulatedServer):
    """Building a session takes a minute."""

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        self.now_s += 60.0
        return super().probe(session)


def test_session_slower_than_the_budget(tune, tiny: Space) -> None:
    result: Result = tune(SlowToBuild(cores=CORES), within=tiny, budget_s=30)
    assert any("overrun" in note for note in result.notes)
    assert len([each for each in result.exclusions if "before the session was timed" in each.reason]) > 0
    assert result.rows, "one configuration is measured"


class Jumping(SimulatedServer):
    """A machine that is suspended for an hour during one measurement."""

    jumped = False

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        if len(self.measured) == 6 and not self.jumped:
            self.jumped = True
            self.now_s += 3600.0
        return found


@pytest.mark.slow
def test_suspended_machine_ends_the_search_in_order(tune, tiny: Space) -> None:
    """A larger budget continues the same search."""
    result: Result = tune(Jumping(cores=CORES), within=tiny, budget_s=400)
    assert any("was overrun by" in note for note in result.notes)
    assert result.rows
    again = Jumping(cores=CORES)
    again.jumped = True
    assert tune(again, within=tiny, budget_s=4400).candidate is not None


def fastest(candidate: Candidate) -> bool:
    return candidate[PRECISION] == "bf16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "every_s", "own_s"), [(TARGETS["rate"], 2.5, 0.5), (TARGETS["load"], 9.0, 0.6)], ids=TARGETS
)
def test_stalling_candidate_is_never_chosen(tune, target: Target, every_s: float, own_s: float) -> None:
    """It is the fastest one between its stalls."""
    pauses = {True: (every_s, own_s), False: (0.0, 0.0)}
    server = SimulatedServer(cores=CORES, noise=0.02, pauses=lambda each: pauses[fastest(each)])
    result: Result = tune(server, target=target, budget_s=900)
    assert result.candidate is not None
    assert not fastest(result.candidate)


class Variable(SimulatedServer):
    """Each start of a server has a random speed."""

    luck, starts = 1.0, 0

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        if self.served != candidate:
            self.starts += 1
            self.luck = 1.0 + 0.25 * random.Random(self.starts).random()
        found = super().measure(candidate, load, seconds, seed)
        return replace(found, latency=found.latency.scaled(self.luck)) if isinstance(found, Measured) else found


@pytest.mark.slow
def test_today_wins_on_machine_with_variable_starts(tune, space: Space) -> None:
    """At this rate, no varying key makes a difference."""
    part = only(space, MAX_BATCH_SIZE, {QUEUE_DELAY_US: 0})
    axes = [replace(axis, values=(8, 4, 16)) if axis.key == MAX_BATCH_SIZE else axis for axis in part.axes]
    narrow = replace(part, axes=tuple(axes))

    for seed in range(4):
        server = Variable(cores=CORES, noise=0.03)
        server.starts = seed
        result = tune(server, target=AT_60, within=narrow, budget_s=1000, seed=seed, file=f"{seed}")
        assert result.candidate == narrow.default
        assert all("near-tie" in row.scored.lost for row in result.rows if row.scored.candidate != narrow.default)
