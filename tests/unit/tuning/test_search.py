"""The search on a simulated server: finds what is known to be best, whatever goes wrong meanwhile."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tuned
from simulated_server import SimulatedModel, SimulatedServer, true_rate
from tuned import measured

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
from graphkiln.tuning.contest import LoadContest, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.result import CandidateScore, Point, Race, Result, knee
from graphkiln.tuning.search import (
    FINALISTS,
    NO_TIME,
    Conclusion,
    Ladder,
    Probes,
    _missed,
    best_reached,
    bound_notes,
    confirm,
    has_reached,
    probe,
    rematch,
    shortlist,
    sweep,
    unmeasured,
)
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval, Latency, requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, LoadShape, Measured, OpenLoop

CORES, P99_S, BUDGET_S = 2, 0.08, 1000.0


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


def test_what_is_promised_was_measured_again_and_its_bound_is_within_the_target(tune, tiny: Space) -> None:
    server = SimulatedServer(cores=CORES, noise=0.05)
    promise = tune(server, within=tiny, budget_s=400).promise
    assert promise.measured.latency.p99_at_most_s <= P99_S
    again = [call for call in server.measured if isinstance(call[1], OpenLoop) and call[1].rate == promise.load.rate]
    assert again


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


def test_nothing_at_all_that_works_is_told(tune) -> None:
    result = tune(SimulatedServer(cores=CORES, fault=lambda _: "load"), budget_s=300)
    assert result.candidate is None
    assert result.closest is None
    assert all(each.reason for each in result.exclusions)


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
    narrow = space.only([MAX_BATCH_SIZE]).fixed({QUEUE_DELAY_US: 0, THREADS: 1})
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
    assert len(calls) == len(set(calls)), "measured twice"
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


# Rungs: what surely loses leaves at once, what ranks low leaves with its rank, and the default stays.


class Known:
    """A contest whose scores are the candidates' places; the second measurement is exact."""

    def __init__(self, reference: Reference, order: list[Candidate]) -> None:
        self.reference, self.order, self.seconds = reference, order, []

    def advance(self, scored: CandidateScore, seconds: float, reached: float) -> CandidateScore:
        del reached
        self.seconds.append(seconds)
        self.reference.measure(scored.candidate, ClosedLoop(1), seconds)
        value = float(100 - self.order.index(scored.candidate))
        is_exact = seconds > 1
        return replace(scored, score=Interval(value, value if is_exact else 0.0, value if is_exact else 200.0))

    def describe(self, score: float) -> str:
        return f"{score:g}"


@pytest.fixture
def reference(reference_of: Callable[[SimulatedServer], Reference]) -> Reference:
    return reference_of(SimulatedServer(cores=2))


def climb(
    reference: Reference, space: Space, keep: list[Candidate], has_time: Callable[[], bool]
) -> list[CandidateScore]:
    order = list(space.candidates[:36])
    contest = Known(reference, order)
    entered = [CandidateScore(candidate=each, score=Interval(200, 0, 200)) for each in reversed(order)]
    return Ladder(contest, reference, has_time, keep).climb(entered, 1.0)  # type: ignore[arg-type]


def test_the_best_are_left_and_the_others_say_why(reference: Reference, space: Space) -> None:
    scores = climb(reference, space, [], lambda: True)
    assert len(scores) == 36
    left = [each.candidate for each in scores if not each.lost]
    assert left == list(space.candidates[:1]), "exact scores tell all others from the best"
    reasons = {each.candidate: each.lost for each in scores}
    assert reasons[space.candidates[35]] == "ranks 36 of 36 after 1 s"
    assert reasons[space.candidates[5]] == "95 at best, where another has 100"


def test_some_leave_only_when_they_are_surely_worse(reference: Reference, space: Space) -> None:
    last = space.candidates[35]
    scores = climb(reference, space, [last], lambda: True)
    assert next(each.lost for each in scores if each.candidate == last) == "65 at best, where another has 100"


def test_without_time_what_was_not_measured_is_out(reference: Reference, space: Space) -> None:
    turns = iter([True] * (1 + 9 + 9))  # the rung, and each of two chunks with its measurements
    scores = climb(reference, space, [], lambda: next(turns, False))
    assert sum("budget was spent" in each.lost for each in scores) == 36 - 16
    assert sum(not each.lost for each in scores) >= FINALISTS


def test_the_best_of_none_is_nothing() -> None:
    assert best_reached([]) == float("-inf")


# Each session is probed once; a short list is spread over sessions and schedulers.

TARGET = Target(p99_s=0.08)


def test_each_session_is_probed_once(space: Space) -> None:
    server = SimulatedServer(cores=2)
    probes = probe(space, TARGET, server)
    sessions = {each.restricted_to(SESSION_KEYS) for each in space.candidates}
    assert set(probes.sessions) == sessions
    assert server.now_s == len(sessions)
    assert set(probes.viable) | {each.candidate for each in probes.refused} == set(space.candidates)
    assert all(each[PRECISION] != "int8" for each in probes.viable)


def test_a_short_list_has_every_session_before_a_second_of_any(space: Space) -> None:
    probes = probe(space, TARGET, SimulatedServer(cores=2))
    viable = {each.restricted_to(SESSION_KEYS) for each in probes.viable}
    short = shortlist(probes, len(viable))
    assert {each.restricted_to(SESSION_KEYS) for each in short} == viable
    assert len(shortlist(probes, 10_000)) == len(probes.viable)


def test_some_are_taken_anyway(space: Space) -> None:
    probes = probe(space, TARGET, SimulatedServer(cores=2))
    last = shortlist(probes, 10_000)[-1]
    assert shortlist(probes, 3, [last])[0] == last
    assert len(shortlist(probes, 3, [last])) == 3


def test_what_did_not_load_has_no_times(space: Space) -> None:
    probes = probe(space, Target(p99_s=0.001), SimulatedServer(cores=2))
    assert probes.viable == ()
    with pytest.raises(KeyError):
        probes.bare(space.default.with_values({PRECISION: "fp8"}))


# The promise: measured again with other arrivals, and lowered until its bound holds.


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(cores=2, noise=0.02)


def scored(space: Space, rate: float) -> CandidateScore:
    return CandidateScore(candidate=space.default, score=Interval.exact(rate))


Within = Callable[[SimulatedServer, float], RecordedTrials]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Within]:
    """Measures on a simulated server within a budget."""
    with ExitStack() as stack:

        def within(server: SimulatedServer, budget_s: float) -> RecordedTrials:
            journal = stack.enter_context(Journal(tmp_path / f"{server.now_s}", {}))
            trials = RecordedTrials(server, journal, server.clock)
            trials.budget.total_s = budget_s
            return trials

        yield within


def test_a_rate_that_holds_is_promised(server: SimulatedServer, space: Space, recorded: Within) -> None:
    rate = 0.5 * true_rate(server, space.default, TARGET.p99_s)
    promise, reason = confirm(recorded(server, 1000.0), scored(space, rate), TARGET, 1.0)
    assert reason == ""
    assert promise is not None
    assert promise.load == OpenLoop(float(f"{rate:.4g}"))
    assert promise.measured.latency.p99.upper <= TARGET.p99_s


def test_a_rate_that_does_not_is_lowered(server: SimulatedServer, space: Space, recorded: Within) -> None:
    true = true_rate(server, space.default, TARGET.p99_s)
    promise, _ = confirm(recorded(server, 1000.0), scored(space, 1.3 * true), TARGET, 1.0)
    assert promise is not None
    assert isinstance(promise.load, OpenLoop)
    assert 0.5 * true <= promise.load.rate <= true * 1.03


def test_a_slower_machine_is_promised_less(server: SimulatedServer, space: Space, recorded: Within) -> None:
    promise, _ = confirm(recorded(server, 1000.0), scored(space, 40.0), TARGET, 0.5)
    assert promise is not None
    assert promise.load == OpenLoop(20.0)


def test_a_given_rate_is_not_lowered(server: SimulatedServer, space: Space, recorded: Within) -> None:
    target = Target(p99_s=0.08, rate=500.0, objective=Objective.COST)
    promise, reason = confirm(recorded(server, 100.0), scored(space, -1.0), target, 1.0)
    assert promise is None
    assert reason.startswith("its p99 did not hold")
    assert {call[1] for call in server.measured} == {OpenLoop(500.0)}


def test_a_budget_that_is_spent_ends_it(server: SimulatedServer, space: Space, recorded: Within) -> None:
    trials = recorded(server, 12.0)
    promise, reason = confirm(trials, scored(space, 1000.0), TARGET, 1.0)
    assert promise is None
    assert reason.endswith("and the budget is spent")
    assert trials.spent_s <= 12.0


def test_a_failure_is_the_reason(server: SimulatedServer, space: Space, recorded: Within) -> None:
    server.fault = lambda _: "crash"
    assert confirm(recorded(server, 100.0), scored(space, 10.0), TARGET, 1.0) == (
        None,
        "the server died with signal 11",
    )


def test_the_curve_rises_and_stops_with_the_budget(server: SimulatedServer, space: Space, recorded: Within) -> None:
    rate = 0.9 * true_rate(server, space.default, TARGET.p99_s)
    promise, _ = confirm(recorded(server, 1000.0), scored(space, rate), TARGET, 1.0)
    assert promise is not None
    curve, failure = sweep(recorded(server, 1000.0), space.default, promise, 20.0)
    assert failure == ""
    rates = [each.load.rate for each in curve if isinstance(each.load, OpenLoop)]
    assert len(rates) == 6
    assert rates == sorted(rates)
    assert curve[-1].measured.latency.p99.value > curve[0].measured.latency.p99.value
    assert knee(curve) in (None, *rates)
    assert len(sweep(recorded(server, 50.0), space.default, promise, 20.0)[0]) == 2
    assert isinstance(curve[0].measured, Measured)


def test_the_last_measurement_that_fits_is_long_enough_for_a_bound_and_promises_less(
    server: SimulatedServer, space: Space, recorded: Within
) -> None:
    rate = 0.9 * true_rate(server, space.default, TARGET.p99_s)
    trials = recorded(server, 1100 / rate + 8)
    promise, reason = confirm(trials, scored(space, rate), TARGET, 1.0)
    assert reason == ""
    assert promise is not None
    assert promise.load == OpenLoop(float(f"{0.75 * rate:.4g}"))
    assert trials.count == 1
    assert promise.measured.latency.count >= 700


def test_too_few_requests_are_told_from_a_rate_that_does_not_hold() -> None:
    few = Latency.of(np.append(np.full(95, 0.02), [0.07] * 5))
    assert few.p99_at_most_s > TARGET.p99_s
    measured = replace(tuned.measured(10.0, 0.07), latency=few)
    assert _missed(measured, TARGET.p99_s) == (
        "measured again, its p99 was 70 ms in 100 requests: too few to be sure of the target"
    )
    assert _missed(measured, 0.05) == "its p99 did not hold when it was measured again: 70 ms"


class Growing(SimulatedServer):
    """Answers fewer requests than come; none has waited for long yet."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        del candidate, load, seconds, seed
        return tuned.measured(60.0, 0.02)


def test_a_queue_that_grows_is_no_promise(space: Space, recorded: Within) -> None:
    promise, reason = confirm(recorded(Growing(cores=2), 1000.0), scored(space, 100.0), TARGET, 1.0)
    assert promise is None
    assert reason == "measured again, 60 of 100 requests per second were answered: their queue grows"


@pytest.mark.parametrize(("p99_s", "requests"), [(0.07, 7 * requests_needed(1)), (0.09, requests_needed(5))])
def test_requests_that_wait_for_each_other_take_more_of_them(
    server: SimulatedServer, space: Space, recorded: Within, p99_s: float, requests: float
) -> None:
    """Where the search met the target: of a queue that grows, how many say as much as one is no guide."""
    seen = tuned.measured(40.0, p99_s)
    seen = replace(seen, latency=replace(seen.latency, inflation=7.0))
    asked = replace(scored(space, 40.0), points=(Point(load=OpenLoop(40.0), measured=seen),))
    confirm(recorded(server, 210.0), asked, TARGET, 1.0)
    slice_s = (210.0 - 5.0) / 5
    assert server.measured[0][2] == pytest.approx(max(slice_s, requests / 40), abs=0.01)


def test_a_failure_beside_the_promise_is_told(server: SimulatedServer, space: Space, recorded: Within) -> None:
    promise, _ = confirm(recorded(server, 1000.0), scored(space, 20.0), TARGET, 1.0)
    assert promise is not None
    server.fault = lambda _: "crash"
    curve, failure = sweep(recorded(server, 1000.0), space.default, promise, 20.0)
    assert curve == (promise,)
    assert failure == "beside the promise, at 5 requests per second, it failed: the server died with signal 11"


AT_RATE = Target(p99_s=0.08, rate=40.0, objective=Objective.LATENCY)


@pytest.mark.parametrize("stands_still_by_itself", [False, True])
def test_a_load_that_is_given_is_tried_twice_the_second_time_for_longer(
    server: SimulatedServer, space: Space, recorded: Within, stands_still_by_itself: bool
) -> None:
    """Once the machine may have stood still; what a candidate does by itself it does again."""
    server.stalls = [(3.0, 2.0)]
    if stands_still_by_itself:
        server.stalls, server.pauses = [], lambda _: (4.0, 0.5)
    promise, reason = confirm(recorded(server, 300.0), scored(space, -1.0), AT_RATE, 1.0)
    assert reason.startswith("its p99 did not hold when it was measured again")
    assert (promise is None) is stands_still_by_itself
    first_s, second_s = (call[2] for call in server.measured)
    assert second_s == pytest.approx(2 * first_s)


# Near-ties: the one that is better wins, though its bracket was worse.

WORSE_RATE = 100.0


def race(rate: float, longest_s: float = 30.0) -> Race:
    """At a rate; whoever measures is no part of it."""
    contest = RateContest(cast("Reference", None), Target(p99_s=0.08), 2.0, longest_s)
    return contest.race(CandidateScore(candidate=Candidate.of({}), score=Interval(rate, rate, rate)))


@pytest.fixture
def pair(tiny: Space) -> tuple[CandidateScore, CandidateScore]:
    """One that reached less than it can, and one whose rate was luck."""
    better = tiny.default.with_values({THREADS: 1, INSTANCES: 2})
    worse = tiny.default.with_values({THREADS: 1, INSTANCES: 1})
    return (
        CandidateScore(candidate=better, score=Interval(95, 94, 99)),
        CandidateScore(candidate=worse, score=Interval(101, 100, 103)),
    )


def simplicity(candidate: Candidate) -> tuple[int, int, str]:
    """One instance is simpler than two."""
    return (candidate.number(INSTANCES), 0, "")


def test_the_better_one_wins(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    better, worse = pair
    reference = reference_of(SimulatedServer(cores=2, noise=0.05))
    first, second = rematch([worse, better], worse, reference, lambda: True, race(WORSE_RATE), simplicity=simplicity)
    assert (first.candidate, first.lost, first.score.lower) == (better.candidate, "", 100.0)
    assert second.candidate == worse.candidate
    assert second.lost.startswith("a near-tie, measured 2 times more: ")


def test_of_those_that_no_round_tells_apart_the_simplest_wins(
    tiny: Space, reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    """The same but for a key that changes nothing at this rate, and which of both came first."""
    simple = CandidateScore(candidate=tiny.default.with_values({MAX_BATCH_SIZE: 8}), score=Interval(20, 20, 20))
    other = CandidateScore(candidate=tiny.default.with_values({MAX_BATCH_SIZE: 16}), score=Interval(20, 20, 20))
    for near, best in (([simple], other), ([other], simple)):
        reference = reference_of(SimulatedServer(cores=2))
        first, second = rematch(
            near,
            best,
            reference,
            lambda: True,
            race(20.0),
            simplicity=lambda each: (each.number(MAX_BATCH_SIZE), 0, ""),
        )
        assert first.candidate == simple.candidate
        assert second.lost.endswith("the chosen one is simpler")


def test_all_get_the_same_arrivals_and_new_ones_in_each_round(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2, noise=0.05)
    rematch([pair[0]], pair[1], reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity)
    seeds = [call[3] for call in server.measured]
    assert seeds[:4] == [1, 1, 2, 2]
    assert {call[1] for call in server.measured} == {server.measured[0][1]}


def test_a_round_that_was_not_finished_does_not_count(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    turns = itertools.count()
    assert (
        rematch(
            [pair[0]],
            pair[1],
            reference_of(SimulatedServer(cores=2)),
            lambda: next(turns) < 3,
            race(WORSE_RATE),
            simplicity=simplicity,
        )
        == []
    )


def test_one_alone_is_not_measured(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2)
    assert (
        rematch([pair[1]], pair[1], reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity) == []
    )
    assert server.measured == []


def test_one_that_fails_loses(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    better, worse = pair
    server = SimulatedServer(cores=2, fault=lambda candidate: "crash" if candidate == better.candidate else "")
    first, second = rematch(
        [better], worse, reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity
    )
    assert first.candidate == worse.candidate
    assert second.lost == "the server died with signal 11"


def test_there_is_no_race_without_the_time_for_two_rounds(
    pair: tuple[CandidateScore, CandidateScore], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    """Starts of five seconds are expected, ten are measured, and something is kept for the proof."""
    for budget_s, is_run in ((70.0, False), (110.0, True)):
        server = SimulatedServer(cores=2, noise=0.05)
        reference = reference_of(server)
        reference.trials.budget.total_s = budget_s
        rematch([pair[0]], pair[1], reference, lambda: True, race(WORSE_RATE, 10.0), simplicity=simplicity)
        assert bool(server.measured) is is_run


LATENCY = Target(p99_s=0.08, rate=60.0, objective=Objective.LATENCY)


class Moody(SimulatedServer):
    """Each start of a server has its own luck, which lasts; what differs between two set-ups may be that alone."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        assert isinstance(found, Measured)
        return replace(found, latency=found.latency.scaled(1.0 + 0.15 * self._luck(candidate, seed)))

    def _luck(self, candidate: Candidate, seed: int) -> float:
        return ((int(candidate.id, 16) >> seed) % 8) / 8


@pytest.mark.parametrize("better", [False, True])
def test_what_serves_today_leaves_only_for_what_is_surely_better(
    tiny: Space, reference_of: Callable[[SimulatedServer], Reference], better: bool
) -> None:
    """A configuration that differs in nothing that matters at this rate, though it looked better; and one that does."""
    reference = reference_of(Moody(cores=2))
    contest = LoadContest(reference, LATENCY, 2.0, 60.0)
    today = tiny.default.with_values({THREADS: 1 if better else 2})
    other = tiny.default.with_values({THREADS: 2, MAX_BATCH_SIZE: 8 if better else 16})
    behind = CandidateScore(candidate=today, score=Interval(-0.014, -0.015, -0.013))
    best = CandidateScore(candidate=other, score=Interval(-0.010, -0.011, -0.009))
    ranks = [today, other]
    raced = rematch(
        [behind], best, reference, lambda: True, contest.race(best), simplicity=lambda each: (ranks.index(each), 0, "")
    )  # type: ignore[arg-type]
    assert raced[0].candidate == (other if better else today)
    assert raced[0].score == (best if better else behind).score, "its own figures"
    assert raced[1].lost.startswith("a near-tie, measured ")
    assert "p99 under the same load" in raced[1].lost


# What is said of candidates when a search is over.

BY_RATE = Target(p99_s=0.08)
BY_LATENCY = Target(p99_s=0.08, rate=60.0, objective=Objective.LATENCY)


def stands(candidate: Candidate, lower: float, p99_s: float = 0.02, lost: str = "") -> CandidateScore:
    points = (Point(load=OpenLoop(abs(lower) or 1.0), measured=measured(100, p99_s)),)
    return CandidateScore(candidate=candidate, score=Interval(lower, lower, lower), points=points, lost=lost)


def conclude(
    space: Space, chosen: CandidateScore | None, *others: CandidateScore, target: Target = BY_RATE
) -> Conclusion:
    """All others were measured as exactly as it goes."""
    contest = (LoadContest if target.rate else RateContest)(cast("Reference", None), target, 2.0, 60.0)
    sessions = {each.restricted_to(SESSION_KEYS): Bare(batch_s={1: 0.001}) for each in space.candidates}
    return Conclusion(
        space=space,
        target=target,
        contest=contest,
        probes=Probes(sessions=sessions),
        settled={each.candidate for each in others},
        chosen=chosen,
        cores=2,
    )


@pytest.mark.parametrize(
    ("target", "lower", "reached"),
    [(BY_RATE, 0.0, False), (BY_RATE, 5.0, True), (BY_LATENCY, -0.01, True), (BY_LATENCY, -math.inf, False)],
)
def test_the_target_was_met_or_not(space: Space, target: Target, lower: float, reached: bool) -> None:
    assert has_reached(stands(space.default, lower), target) is reached


def test_the_closest_is_the_best_that_met_the_target_though_it_was_not_proven(space: Space) -> None:
    """The lowest p99 of all is that of a low rate."""
    first, second, third = space.candidates[:3]
    fast, slow, missed = stands(first, 90.0, 0.07), stands(second, 10.0, 0.01), stands(third, 0.0, 0.005)
    found = conclude(space, None, fast, slow, missed)
    rows = [found.row(each) for each in (fast, slow, missed)]
    assert found.closest(rows) is rows[0]
    assert found.closest(rows[2:]) is rows[2]
    assert found.closest([]) is None


def test_where_no_load_met_the_target_the_score_says_so(space: Space) -> None:
    missed = stands(space.default, 0.0)
    row = conclude(space, None, missed).row(replace(missed, score=Interval(40.0, 0.0, 50.0)))
    assert row.score == "40 requests per second; no load met the target"


def test_each_reason_is_what_was_found(space: Space) -> None:
    simple, other = space.default, space.default.with_values({MAX_BATCH_SIZE: 16})
    chosen = stands(simple, 90.0)
    tie, worse, none = stands(other, 89.0), stands(other, 50.0), stands(other, 0.0)

    def reason(scored: CandidateScore, *settled: CandidateScore) -> str:
        return conclude(space, chosen, *settled).row(scored).scored.lost

    assert reason(tie, tie) == "no significant difference from the chosen one, which is simpler"
    assert reason(worse, worse) == "50 requests per second, the chosen one 90 requests per second"
    assert reason(none, none).startswith("did not meet the target at the load of the chosen one")
    assert reason(worse) == "the budget was spent before it was compared with the chosen one"
    assert reason(worse.out("it hung"), worse) == "it hung"
    assert reason(chosen) == ""


def test_a_tie_that_is_simpler_than_the_winner_of_a_race_is_told_by_its_figures(space: Space) -> None:
    simple, other = space.default, space.default.with_values({MAX_BATCH_SIZE: 16})
    chosen, tie = stands(other, -0.010), stands(simple, -0.0105)
    lost = conclude(space, chosen, tie, target=BY_LATENCY).row(tie).scored.lost
    assert lost == "p99 10.5 ms, the chosen one p99 10 ms"


def test_what_was_never_measured_says_whether_the_budget_is_to_blame(space: Space) -> None:
    entered = replace(stands(space.default, 0.0), points=())
    assert unmeasured(space.default, None).by_budget
    assert unmeasured(space.default, entered.out(NO_TIME)).by_budget
    assert "more promising" in unmeasured(space.default, entered).reason
    failed = unmeasured(space.default, entered.out("it did not load"))
    assert (failed.reason, failed.by_budget) == ("it did not load", False)


def test_where_bare_sessions_rule_out_everything_the_fastest_is_told(space: Space) -> None:
    times = {"onnxruntime": 0.02, "openvino": 0.01}
    sessions: dict[Candidate, Bare | Failed] = {
        each: Bare(batch_s={1: times[str(each["engine"])]})
        for each in {candidate.restricted_to(SESSION_KEYS) for candidate in space.candidates}
    }
    wrong = next(each for each in sessions if each["engine"] == "openvino" and each["precision"] == "int8")
    sessions[wrong] = Bare(batch_s={1: 0.001}, accuracy="int8: outputs differ")
    probes = Probes(sessions=sessions)
    (note,) = bound_notes(space, probes, Target(p99_s=0.005))
    assert note.startswith("no bare session takes less than 10 ms: engine=openvino, precision=")
    _, rate = bound_notes(space, probes, replace(BY_LATENCY, rate=9e6))
    assert rate.startswith("no bare sessions reach more than ")
    assert "instances=4" in rate
    assert bound_notes(space, replace(probes, viable=space.candidates[:1]), BY_RATE) == []
    assert bound_notes(space, Probes(sessions={each: Failed(reason="no") for each in sessions}), BY_RATE) == []
