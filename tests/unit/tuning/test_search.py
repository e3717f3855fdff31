"""The search on a simulated server: finds what is known to be best, whatever goes wrong meanwhile."""

from __future__ import annotations

import json
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
    SESSION_KEYS,
    THREADS,
    Candidate,
)
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search, probe, shortlist
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import WARM_S, Bare, LoadShape, Measured, OpenLoop

CORES, P99_S, BUDGET_S = 2, 0.08, 1000.0
TARGET = Target(p99_s=P99_S)


def share_of_best(result: Result, best_rate: float) -> float:
    """What the chosen configuration reaches without noise, as a share of the best."""
    assert result.candidate is not None
    return true_rate(SimulatedServer(cores=CORES), result.candidate, P99_S) / best_rate


def test_it_finds_the_best_and_says_why_each_other_one_lost(tune, best_rate, space: Space) -> None:
    server = SimulatedServer(cores=CORES, noise=0.05)
    result = tune(server, within=space, budget_s=BUDGET_S)
    assert share_of_best(result, best_rate) >= 0.95
    assert result.spent_s <= BUDGET_S
    assert result.chosen is not None
    assert result.chosen.scored.lost == ""
    assert all(row.scored.lost for row in result.rows if row is not result.chosen)
    assert all(row.limit and row.score for row in result.rows)
    assert result.front


def test_every_point_of_the_space_is_in_the_table_or_left_out_with_a_reason(tune, small: Space) -> None:
    result = tune(SimulatedServer(cores=CORES), budget_s=300)
    told = [*(row.scored.candidate for row in result.rows), *(each.candidate for each in result.exclusions)]
    assert len(told) == len(set(told)) == small.points
    assert all(each.reason for each in result.exclusions)


@pytest.mark.slow
def test_it_finds_the_best_in_19_of_20_seeds(tune, best_rate, space: Space) -> None:
    find = partial(tune, within=space, budget_s=BUDGET_S)
    shares = [
        share_of_best(find(SimulatedServer(cores=CORES, noise=0.05), seed=seed, file=f"{seed}"), best_rate)
        for seed in range(20)
    ]
    assert sum(share >= 0.95 for share in shares) >= 19, shares


def test_a_machine_that_becomes_slower_halfway_changes_nothing(tune, best_rate) -> None:
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


@pytest.mark.parametrize(
    ("fault", "reason"), [("load", "did not load"), ("hang", "within 20 s"), ("crash", "died with")]
)
def test_candidates_that_fail_are_reasons(tune, tiny: Space, fault: str, reason: str) -> None:
    server = SimulatedServer(cores=CORES, fault=lambda candidate: fault if bad(candidate) else "")
    result = tune(server, within=tiny, budget_s=400)
    assert not bad(result.candidate)
    failed = [each for each in result.exclusions if bad(each.candidate) and reason in each.reason]
    assert failed
    assert not any(bad(row.scored.candidate) for row in result.rows)


def test_the_default_that_fails_is_replaced_as_the_reference(tune, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, fault=lambda candidate: "load" if candidate == tiny.default else "")
    result = tune(server, within=tiny, budget_s=400)
    assert result.candidate is not None
    assert result.default is None
    assert next(each.reason for each in result.exclusions if each.candidate == tiny.default).startswith("it did not")


def test_outputs_beyond_the_policy_are_out_however_fast(tune) -> None:
    result = tune(SimulatedServer(cores=CORES), budget_s=200)
    assert result.candidate[PRECISION] != "int8"
    reasons = {each.reason for each in result.exclusions if each.candidate[PRECISION] == "int8"}
    assert "changes the outputs: int8: outputs differ by 0.3, allowed 0.02" in reasons


def test_a_p99_below_a_run_of_the_model_names_what_comes_closest(tune) -> None:
    """The bare sessions do not rule it out, but no server meets it."""
    model = SimulatedModel(fixed_s=0.02)
    result = tune(SimulatedServer(cores=CORES, model=model), target=Target(p99_s=0.0113), budget_s=500)
    assert result.candidate is None
    assert result.closest.scored.candidate[PRECISION] == "bf16"
    assert result.closest.scored.candidate[ENGINE] == "openvino"
    assert result.closest.limit.startswith(("the model: a run of one sample takes", "a run under load"))


def test_a_p99_below_every_bare_session_needs_no_server(tune) -> None:
    server = SimulatedServer(cores=CORES)
    result = tune(server, target=Target(p99_s=0.001))
    assert result.candidate is None
    assert server.measured == []
    assert any(note.startswith("no bare session takes less than ") for note in result.notes)
    assert {each.reason.partition(" takes")[0] for each in result.exclusions if "bare" in each.reason} == {
        "its bare session alone"
    }


def test_of_configurations_that_are_alike_the_simplest_is_chosen(tune, space: Space) -> None:
    """Under a light load the largest batch makes no difference."""
    narrow = only(space, MAX_BATCH_SIZE, {QUEUE_DELAY_US: 0, THREADS: 1})
    target = Target(p99_s=P99_S, rate=20.0, objective=Objective.LATENCY)
    result = tune(SimulatedServer(cores=CORES, noise=0.05), target=target, within=narrow, budget_s=BUDGET_S)
    assert result.candidate == narrow.default


@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.COST, Objective.LATENCY])
def test_at_a_given_rate_the_objective_decides(tune, objective: Objective) -> None:
    target = Target(p99_s=P99_S, rate=60.0, objective=objective)
    result = tune(SimulatedServer(cores=CORES, noise=0.02), target=target, budget_s=BUDGET_S)
    assert result.promise.load == OpenLoop(60.0)
    assert result.promise.measured.latency.p99_at_most_s <= P99_S
    if objective is Objective.MEMORY:
        assert result.candidate[INSTANCES] == 1
    else:
        assert (result.candidate[ENGINE], result.candidate[PRECISION]) == ("openvino", "bf16")


class SlowToStart(SimulatedServer):
    """Takes long until it serves, as on a busy machine."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured:
        if self.served != candidate:
            self.now_s += 12.0
        return super().measure(candidate, load, seconds, seed)

    def probe(self, session: Candidate) -> Bare:
        self.now_s += 4.0
        return super().probe(session)


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.MEMORY])
@pytest.mark.parametrize("budget_s", [90, 150, 250, 400])
def test_a_budget_is_kept_however_slow_starts_are_and_what_was_not_tried_is_told(
    tune, budget_s: int, objective: Objective
) -> None:
    target = Target(p99_s=P99_S, rate=None if objective is Objective.THROUGHPUT else 40.0, objective=objective)
    result = tune(SlowToStart(cores=CORES), budget_s=budget_s, target=target)
    assert result.spent_s <= budget_s
    untried = [each for each in result.exclusions if each.by_budget]
    assert untried
    assert all("budget" in each.reason for each in untried)
    assert not any("budget" in each.reason for each in result.exclusions if each not in untried)
    assert result.candidate or any("with a larger one the search goes on" in note for note in result.notes)


def test_a_budget_below_a_single_start_is_overrun_by_what_must_be_measured_alone(tune) -> None:
    server = SlowToStart(cores=CORES)
    result = tune(server, budget_s=10)
    assert len({call[0] for call in server.measured}) == 1
    assert result.spent_s <= 60
    assert any("was overrun by" in note for note in result.notes)


class Killed(BaseException):
    """In the place of kill -9: nothing is written after it."""


class MortalServer(SlowToStart):
    """Is killed in the middle of its n-th measurement, and with it the server that it takes long to start."""

    deaths: int = 0

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured:
        self.deaths -= 1
        if self.deaths == 0:
            raise Killed
        return super().measure(candidate, load, seconds, seed)


def test_killed_at_random_moments_it_comes_to_the_same_choice_and_measures_nothing_twice(
    tune, tiny: Space, tmp_path: Path
) -> None:
    """Twice in a row at the same one, too. What a kill costs is charged to nobody, or the budget ended elsewhere."""
    tune = partial(tune, within=tiny, budget_s=400)
    generator, noise = random.Random(5), {"cores": CORES, "noise": 0.05}
    undisturbed = tune(SlowToStart(**noise), file="undisturbed")
    assert undisturbed.candidate is not None
    calls = []
    for deaths in (2, 1, 2, 1, 2, *(generator.randint(2, 3) for _ in range(5))):  # a third in one measurement fails it
        server = MortalServer(**noise)
        server.deaths = deaths
        with pytest.raises(Killed):
            tune(server)
        calls += server.measured
        journal = tmp_path / "journal"
        torn = journal.read_bytes()[: -generator.randint(1, 40)]
        begins = torn.rpartition(b"\n")[2].startswith(b'{"begun"')
        if begins and deaths > 1:  # kill -9 tears the line that is being written
            journal.write_bytes(torn)
    last = SlowToStart(**noise)
    result = tune(last)
    calls += last.measured
    assert calls
    assert result.candidate == undisturbed.candidate
    assert result.promise == undisturbed.promise
    assert result.rows == undisturbed.rows
    recorded = [call for call in calls if call[2:] != (WARM_S, 0)]  # not counted: the server's second start
    assert len(recorded) == len(set(recorded)), "measured twice"
    done = [line for line in (tmp_path / "journal").read_text().splitlines() if line.startswith('{"done"')]
    assert len(done) == result.measurements, "measured in vain"


def test_a_finished_search_is_read_from_its_journal(tune, tiny: Space, tmp_path: Path) -> None:
    tune = partial(tune, within=tiny, budget_s=300)
    first = tune(SimulatedServer(cores=CORES))
    size = (tmp_path / "journal").stat().st_size
    server = SimulatedServer(cores=CORES)
    assert tune(server) == first
    assert server.measured == []
    assert (tmp_path / "journal").stat().st_size == size
    assert json.loads((tmp_path / "journal").read_text().splitlines()[0])["seed"] == 0


def test_a_short_list_has_every_session_before_a_second_of_any(space: Space) -> None:
    probes = probe(space, TARGET, SimulatedServer(cores=2))
    viable = {each.restricted_to(SESSION_KEYS) for each in probes.viable}
    short = shortlist(probes, len(viable))
    assert {each.restricted_to(SESSION_KEYS) for each in short} == viable
    assert len(shortlist(probes, 10_000)) == len(probes.viable)


# Near-ties: the better one wins, though its bracket was worse.


@pytest.fixture
def search_of(tmp_path: Path, tiny: Space) -> Iterator[Callable[..., Search]]:
    """A search at the moment of its race."""
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
def test_the_better_one_wins_a_race_unless_it_fails(search_of, tiny: Space, fails: bool) -> None:
    better = rated(tiny.default.with_values({THREADS: 1, INSTANCES: 2}), 95.0)
    lucky = rated(tiny.default.with_values({THREADS: 1, INSTANCES: 1}), 100.0)
    crashes = lambda each: "crash" if fails and each == better.candidate else ""  # noqa: E731
    search = search_of(SimulatedServer(cores=CORES, noise=0.05, fault=crashes), lucky, better)
    search._race_near_ties()
    winner, loser = (lucky, better) if fails else (better, lucky)
    assert search._best().candidate == winner.candidate
    assert search._best().score.lower == 100.0
    reason = "signal 11" if fails else "a near-tie, measured 2 times more"
    assert reason in search._scores[loser.candidate].lost


def test_of_those_that_no_round_tells_apart_the_simplest_wins(search_of, tiny: Space) -> None:
    simple, other = (rated(tiny.default.with_values({MAX_BATCH_SIZE: size}), 20.0) for size in (8, 16))
    search = search_of(SimulatedServer(cores=CORES), other, simple)
    search._race_near_ties()
    assert search._best().candidate == simple.candidate
    assert search._scores[other.candidate].lost.endswith("the chosen one is simpler")


def test_all_get_the_same_arrivals_and_new_ones_in_each_round(search_of, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, noise=0.05)
    search_of(
        server, *(rated(tiny.default.with_values({THREADS: 1, INSTANCES: n}), 100) for n in (1, 2))
    )._race_near_ties()
    assert [call[3] for call in server.measured][:4] == [1, 1, 2, 2]
    assert len({call[1] for call in server.measured}) == 1


def test_nothing_at_all_that_works_is_told(tune) -> None:
    result = tune(SimulatedServer(cores=CORES, fault=lambda _: "load"), budget_s=300)
    assert result.candidate is None
    assert result.closest is None
    assert all(each.reason for each in result.exclusions)
