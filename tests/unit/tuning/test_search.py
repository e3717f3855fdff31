"""The search on a simulated server whose best configuration is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from simulated_server import SimulatedModel, SimulatedServer, true_rate
from tuned import measured, only

from graphkiln.tuning.candidate import (
    ENGINE,
    INSTANCES,
    MAX_BATCH_SIZE,
    PRECISION,
    QUEUE_DELAY_US,
    THREADS,
    Candidate,
)
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import WARM_S, LoadShape, Measured, OpenLoop, SessionTiming

CORES, P99_S, BUDGET_S = 2, 0.08, 1000.0
TARGET = Target(p99_s=P99_S)


def share_of_best(result: Result, best_rate: float) -> float:
    """Return the rate of the choice without noise as a share of the best rate."""
    assert result.candidate is not None
    return true_rate(SimulatedServer(cores=CORES), result.candidate, P99_S) / best_rate


def test_best_is_found_and_others_have_a_reason(tune, best_rate, space: Space) -> None:
    server = SimulatedServer(cores=CORES, noise=0.05)
    result = tune(server, within=space, budget_s=BUDGET_S)
    assert share_of_best(result, best_rate) >= 0.95
    assert result.spent_s <= BUDGET_S
    assert result.chosen is not None
    assert result.chosen.scored.lost == ""
    assert all(row.scored.lost for row in result.rows if row is not result.chosen)
    assert all(row.limit and row.score for row in result.rows)

    assert result.front
    listed = [*(row.scored.candidate for row in result.rows), *(each.candidate for each in result.exclusions)]
    assert len(listed) == len(set(listed)) == space.points
    reasons = {each.reason for each in result.exclusions if each.candidate[PRECISION] == "int8"}
    assert "changes the outputs: int8: outputs differ by 0.3, allowed 0.02" in reasons


@pytest.mark.slow
def test_best_is_found_for_19_of_20_seeds(tune, best_rate, space: Space) -> None:
    find = partial(tune, within=space, budget_s=BUDGET_S)
    shares = [
        share_of_best(find(SimulatedServer(cores=CORES, noise=0.05), seed=seed, file=f"{seed}"), best_rate)
        for seed in range(20)
    ]
    assert sum(share >= 0.95 for share in shares) >= 19, shares


def test_slower_machine_does_not_change_the_choice(tune, best_rate) -> None:
    server = SimulatedServer(cores=CORES, noise=0.02, speed=lambda now_s: 1.0 if now_s < 250 else 0.7)
    result = tune(server, budget_s=900)
    assert share_of_best(result, best_rate) >= 0.95
    assert any("measured again" in note for note in result.notes)
    assert result.readings[-1].level == pytest.approx(0.7, abs=0.05)
    slow = SimulatedServer(cores=CORES, speed=lambda _: 0.7)
    assert result.promise.load.rate <= true_rate(slow, result.candidate, P99_S) * 1.05, (
        "promised on the machine as it is"
    )


def bad(candidate: Candidate) -> bool:
    return candidate[ENGINE] == "openvino" and candidate[THREADS] == 2


def test_failed_candidates_are_excluded(tune, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, fault=lambda candidate: "crash" if bad(candidate) else "")
    result = tune(server, within=tiny, budget_s=400)
    assert not bad(result.candidate)
    failed = [each for each in result.exclusions if bad(each.candidate) and "died with" in each.reason]
    assert failed
    assert not any(bad(row.scored.candidate) for row in result.rows)


def test_failed_default_is_replaced_as_reference(tune, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, fault=lambda candidate: "load" if candidate == tiny.default else "")
    result = tune(server, within=tiny, budget_s=400)
    assert result.candidate is not None
    assert result.default is None
    assert next(each.reason for each in result.exclusions if each.candidate == tiny.default).startswith("it did not")


def test_unreachable_p99_reports_the_closest(tune) -> None:
    """The sessions' times do not rule the target out, but no server meets it."""
    model = SimulatedModel(fixed_s=0.02)
    result = tune(SimulatedServer(cores=CORES, model=model), target=Target(p99_s=0.0113), budget_s=500)
    assert result.candidate is None
    assert result.closest.scored.candidate[PRECISION] == "bf16"
    assert result.closest.scored.candidate[ENGINE] == "openvino"
    assert result.closest.limit.startswith(("the model: one sample takes", "the model under load"))


def test_the_rest_of_a_short_budget_confirms_the_likeliest(tune, tiny: Space) -> None:
    """The search ended after 33 of 45 s, with a candidate that met the target in its only measurement."""
    result = tune(SimulatedServer(cores=CORES, noise=0.05), within=tiny, budget_s=45)
    assert result.candidate is not None
    assert result.promise.measured.latency.p99_at_most_s <= P99_S
    assert result.chosen.score.startswith(f"{result.promise.load.rate:.3g} requests per second")
    assert "no load met" not in result.chosen.score
    assert result.spent_s <= 45


def test_a_budget_that_is_too_short_names_the_reason_and_a_longer_one(tune, space: Space) -> None:
    result = tune(SimulatedServer(cores=CORES, noise=0.05), within=space, budget_s=30)
    assert (result.candidate, result.is_unproven) == (None, False)
    assert "too few to confirm the target" in result.closest.scored.lost
    assert any("of 30 s were spent" in note and note.endswith("at least 1m") for note in result.notes)


def test_p99_below_all_session_times_needs_no_server(tune) -> None:
    server = SimulatedServer(cores=CORES)
    result = tune(server, target=Target(p99_s=0.001))
    assert result.candidate is None
    assert server.measured == []
    assert any(note.startswith("the fastest session") for note in result.notes)
    assert {each.reason.partition(" takes")[0] for each in result.exclusions if "session" in each.reason} == {
        "a session without a server"
    }


def test_simplest_of_equal_configurations_is_chosen(tune, space: Space) -> None:
    """Under a light load, max_batch_size makes no difference."""
    narrow = only(space, MAX_BATCH_SIZE, {QUEUE_DELAY_US: 0, THREADS: 1})
    target = Target(p99_s=P99_S, rate=20.0, objective=Objective.LATENCY)
    result = tune(SimulatedServer(cores=CORES, noise=0.05), target=target, within=narrow, budget_s=BUDGET_S)
    assert result.candidate == narrow.default


@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.COST])
def test_objective_decides_at_given_rate(tune, objective: Objective) -> None:
    target = Target(p99_s=P99_S, rate=60.0, objective=objective)
    result = tune(SimulatedServer(cores=CORES, noise=0.02), target=target, budget_s=BUDGET_S)
    assert result.promise.load == OpenLoop(60.0)
    assert result.promise.measured.latency.p99_at_most_s <= P99_S
    if objective is Objective.MEMORY:
        assert result.candidate[INSTANCES] == 1
    else:
        assert (result.candidate[ENGINE], result.candidate[PRECISION]) == ("openvino", "bf16")


class SlowToStart(SimulatedServer):
    """A server that starts slowly, as on a busy machine."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured:
        if self.served != candidate:
            self.now_s += 12.0
        return super().measure(candidate, load, seconds, seed)

    def probe(self, session: Candidate) -> SessionTiming:
        self.now_s += 4.0
        return super().probe(session)


@pytest.mark.parametrize(("budget_s", "objective"), [(90, Objective.THROUGHPUT), (250, Objective.MEMORY)])
def test_budget_is_kept_and_untried_candidates_are_listed(tune, budget_s: int, objective: Objective) -> None:
    target = Target(p99_s=P99_S, rate=None if objective is Objective.THROUGHPUT else 40.0, objective=objective)
    result = tune(SlowToStart(cores=CORES), budget_s=budget_s, target=target)
    assert result.spent_s <= budget_s
    untried = [each for each in result.exclusions if each.by_budget]
    assert untried
    assert all("budget" in each.reason for each in untried)
    assert not any("budget" in each.reason for each in result.exclusions if each not in untried)
    assert result.candidate or any("a larger --budget" in note for note in result.notes)


class Killed(BaseException):
    """Simulated kill -9: nothing is written after it."""


class MortalServer(SlowToStart):
    """A server that is killed with the tuner during its n-th measurement."""

    deaths: int = 0

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured:
        self.deaths -= 1
        if self.deaths == 0:
            raise Killed
        return super().measure(candidate, load, seconds, seed)


def test_killed_search_continues_to_the_same_choice(tune, tiny: Space, tmp_path: Path) -> None:
    """Kills include two in a row in the same measurement; they must not change the spent budget."""
    tune = partial(tune, within=tiny, budget_s=400)
    generator, noise = random.Random(5), {"cores": CORES, "noise": 0.05}
    undisturbed = tune(SlowToStart(**noise), file="undisturbed")
    assert undisturbed.candidate is not None
    calls = []
    for deaths in (2, 1, 2, 1, 2, *(generator.randint(2, 3) for _ in range(5))):
        server = MortalServer(**noise)
        server.deaths = deaths
        with pytest.raises(Killed):
            tune(server)
        calls += server.measured
        journal = tmp_path / "journal"
        torn = journal.read_bytes()[: -generator.randint(1, 40)]
        begins = torn.rpartition(b"\n")[2].startswith(b'{"begun"')
        if begins and deaths > 1:  # kill -9 may leave an incomplete line
            journal.write_bytes(torn)
    last = SlowToStart(**noise)
    result = tune(last)
    calls += last.measured
    assert calls
    assert result.candidate == undisturbed.candidate
    assert result.promise == undisturbed.promise
    assert result.rows == undisturbed.rows
    recorded = [call for call in calls if call[2:] != (WARM_S, 0)]  # without second starts of the server
    assert len(recorded) == len(set(recorded)), "measured twice"
    done = [line for line in (tmp_path / "journal").read_text().splitlines() if line.startswith('{"done"')]
    assert len(done) == result.measurements, "measured in vain"


# Races of near-ties.


@pytest.fixture
def search_of(tmp_path: Path, tiny: Space) -> Iterator[Callable[..., Search]]:
    """A search just before its race."""
    with ExitStack() as stack:

        def make(server: SimulatedServer, *scores: CandidateScore, target: Target = TARGET) -> Search:
            journal = stack.enter_context(Journal(tmp_path / f"race{server.cores}{len(scores)}", {}))
            search = Search(tiny, target, RecordedTrials(server, journal, server.clock), budget_s=1e5, cores=CORES)
            search._scores = {each.candidate: each for each in scores}
            return search

        yield make


def rated(candidate: Candidate, lower: float) -> CandidateScore:
    point = Point(load=OpenLoop(lower), measured=measured(lower, 0.05))
    return CandidateScore(candidate=candidate, score=Interval(lower, lower, lower * 1.03), points=(point,))


@pytest.mark.parametrize("fails", [False, True])
def test_better_candidate_wins_race_unless_it_fails(search_of, tiny: Space, fails: bool) -> None:
    better = rated(tiny.default.with_values({THREADS: 1, INSTANCES: 2}), 95.0)
    lucky = rated(tiny.default.with_values({THREADS: 1, INSTANCES: 1}), 100.0)
    crashes = lambda each: "crash" if fails and each == better.candidate else ""  # noqa: E731
    search = search_of(SimulatedServer(cores=CORES, noise=0.05, fault=crashes), lucky, better)
    search._race_near_ties()
    winner, loser = (lucky, better) if fails else (better, lucky)
    assert search._best().candidate == winner.candidate
    assert search._best().score.lower == 100.0
    reason = "signal 11" if fails else "near-tie, raced for 2 rounds"
    assert reason in search._scores[loser.candidate].lost


def test_simplest_wins_undecided_race(search_of, tiny: Space) -> None:
    simple, other = (rated(tiny.default.with_values({MAX_BATCH_SIZE: size}), 20.0) for size in (8, 16))
    search = search_of(SimulatedServer(cores=CORES), other, simple)
    search._race_near_ties()
    assert search._best().candidate == simple.candidate
    assert search._scores[other.candidate].lost.endswith("the chosen one is simpler")


def test_arrivals_are_equal_within_and_new_in_each_round(search_of, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, noise=0.05)
    search_of(
        server, *(rated(tiny.default.with_values({THREADS: 1, INSTANCES: n}), 100) for n in (1, 2))
    )._race_near_ties()
    assert [call[3] for call in server.measured][:4] == [1, 1, 2, 2]
    assert len({call[1] for call in server.measured}) == 1


def test_search_without_working_candidate(tune) -> None:
    result = tune(SimulatedServer(cores=CORES, fault=lambda _: "load"), budget_s=300)
    assert result.candidate is None
    assert result.closest is None
    assert all(each.reason for each in result.exclusions)
