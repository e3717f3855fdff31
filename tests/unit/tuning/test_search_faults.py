"""The search where the question, the candidates or the machine are at fault: what is found, and what is said."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from simulated_server import SimulatedServer, true_rate
from tuned import only

from graphkiln.tuning.candidate import ENGINE, MAX_BATCH_SIZE, PRECISION, QUEUE_DELAY_US, Candidate
from graphkiln.tuning.contest import LoadContest
from graphkiln.tuning.result import Result
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured, OpenLoop

CORES, P99_S = 2, 0.08
AT_60 = Target(p99_s=P99_S, rate=60.0, objective=Objective.LATENCY)
TARGETS = {"rate": Target(p99_s=P99_S), "load": AT_60}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("budget_s", [1, 40])
def test_a_budget_that_proves_nothing_tells_the_best_that_was_found(
    tune, tiny: Space, budget_s: float, target: Target
) -> None:
    """One configuration is measured and tried to be proven, however late that is; nothing more."""
    server = SimulatedServer(cores=CORES, noise=0.05)
    result: Result = tune(server, within=tiny, target=target, budget_s=budget_s)
    assert result.spent_s <= max(budget_s, 5) + 35
    if result.candidate is None:
        assert result.closest is not None
        assert any("with a larger one the search goes on" in note for note in result.notes)
        lowest = [row.scored.score.lower for row in result.rows]
        assert result.is_unproven is any(math.isfinite(each) and each != 0 for each in lowest)
    if result.spent_s > budget_s:
        assert any("was overrun by" in note for note in result.notes)


def test_a_search_that_finds_and_cannot_prove_names_what_it_found(tune, tiny: Space) -> None:
    """Requests that are slow together say too little of each other, however many: no bound is within the target."""

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
    assert "too few to be sure of the target" in result.closest.scored.lost


def test_candidates_that_all_hang_take_no_more_than_the_budget_and_a_few(tune, small: Space) -> None:
    """Each takes 20 s until it is given up."""
    server = SimulatedServer(cores=CORES, fault=lambda _: "hang")
    result: Result = tune(server, budget_s=70)
    assert result.spent_s <= 70 + 3 * 20
    assert len({call[0] for call in server.measured}) == len(server.measured), "none is tried twice"
    assert any("overrun" in note for note in result.notes)
    untried = [each for each in result.exclusions if each.by_budget]
    assert len(untried) > len(small.candidates) / 2


class Unbuildable(SimulatedServer):
    """A session of ONNX Runtime is not built."""

    def probe(self, session: Candidate) -> Bare | Failed:
        if session[ENGINE] == "onnxruntime":
            return Failed(reason="the graph has an operator that it does not know")
        return super().probe(session)


@pytest.mark.slow
def test_a_default_whose_session_is_not_built_is_left_out_with_the_reason(tune, space: Space) -> None:
    result: Result = tune(Unbuildable(cores=CORES), within=space, budget_s=400)
    assert result.candidate[ENGINE] == "openvino"
    assert result.default is None
    (reason,) = {each.reason for each in result.exclusions if each.candidate == space.default}
    assert reason == "the graph has an operator that it does not know"


@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.MEMORY, Objective.COST])
def test_a_rate_far_above_the_capacity_needs_no_server(tune, small: Space, objective: Objective) -> None:
    server = SimulatedServer(cores=CORES)
    result: Result = tune(server, target=Target(p99_s=P99_S, rate=50_000.0, objective=objective))
    assert server.measured == []
    legal = {each.reason for each in result.exclusions if each.candidate in set(small.candidates)}
    assert {reason.partition(" at most")[0] for reason in legal if "outputs" not in reason} == {
        "its bare sessions alone reach"
    }


def test_a_rate_just_above_the_capacity_says_how_many_are_answered(tune, tiny: Space) -> None:
    """Bare sessions do not rule it out: instances that share cores slow each other down."""
    rate = 1.25 * max(SimulatedServer(cores=CORES).capacity(each) for each in tiny.candidates)
    result: Result = tune(SimulatedServer(cores=CORES), within=tiny, target=replace(AT_60, rate=rate), budget_s=400)
    assert result.candidate is None
    assert not result.is_unproven
    assert result.closest.limit.startswith(("throughput: ", "errors: "))


@pytest.mark.slow
def test_a_model_whose_time_depends_on_the_input_is_promised_what_its_slow_inputs_allow(tune, tiny: Space) -> None:
    """Every fourth run takes four times as long; the bare session is timed with the fast ones."""
    inputs = (1.0, 1.0, 1.0, 4.0)
    result: Result = tune(SimulatedServer(cores=CORES, noise=0.02, inputs=inputs), within=tiny, budget_s=600)
    again = SimulatedServer(cores=CORES, inputs=inputs).measure(result.candidate, result.promise.load, 200.0, 5)
    assert isinstance(again, Measured)
    assert again.latency.p99.value <= P99_S * 1.05
    fast = true_rate(SimulatedServer(cores=CORES), result.candidate, P99_S)
    assert result.promise.load.rate < 0.8 * fast


class SlowToBuild(SimulatedServer):
    """A session takes a minute."""

    def probe(self, session: Candidate) -> Bare | Failed:
        self.now_s += 60.0
        return super().probe(session)


def test_a_session_that_takes_longer_than_the_budget_is_told(tune, tiny: Space) -> None:
    result: Result = tune(SlowToBuild(cores=CORES), within=tiny, budget_s=30)
    assert any("overrun" in note for note in result.notes)
    assert len([each for each in result.exclusions if "before its session was timed" in each.reason]) > 0
    assert result.rows, "one configuration is measured"


class Jumping(SimulatedServer):
    """A clock that went on while the machine was paused, once: an hour between two moments of a measurement."""

    jumped = False

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        if len(self.measured) == 6 and not self.jumped:
            self.jumped = True
            self.now_s += 3600.0
        return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_machine_that_was_paused_for_an_hour_ends_the_search_in_order(tune, tiny: Space, target: Target) -> None:
    """And with the time that was lost, the same search goes on."""
    result: Result = tune(Jumping(cores=CORES), within=tiny, target=target, budget_s=400)
    assert any("was overrun by" in note for note in result.notes)
    assert result.rows
    again = Jumping(cores=CORES)
    again.jumped = True
    assert tune(again, within=tiny, target=target, budget_s=4400).candidate is not None


def fastest(candidate: Candidate) -> bool:
    return candidate[PRECISION] == "bf16"


class DiesUnderLoad(SimulatedServer):
    """The fastest serve a little; under more an instance dies, and Triton starts it again."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        if fastest(candidate) and isinstance(load, OpenLoop) and load.rate > 50:
            return Failed(reason="under load, triton_python_backend_stub was killed or crashed")
        return found


@pytest.mark.slow
def test_what_died_under_load_is_not_chosen_for_less_and_asked_no_more(tune) -> None:
    server = DiesUnderLoad(cores=CORES, noise=0.02)
    result: Result = tune(server, budget_s=600)
    assert result.candidate is not None
    assert not fastest(result.candidate)
    died: set[Candidate] = set()
    for candidate, load, _, _ in server.measured:
        assert candidate not in died, "it was asked again"
        if fastest(candidate) and isinstance(load, OpenLoop) and load.rate > 50:
            died.add(candidate)
    assert died
    reasons = [row.scored.lost for row in result.rows if row.scored.candidate in died]
    assert all("killed or crashed" in reason for reason in reasons)


class StallsAtFirst(SimulatedServer):
    """The machine stands still while a candidate is asked for the first time how it does under the load."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        is_first = not any(call[0] == candidate and isinstance(call[1], OpenLoop) for call in self.measured)
        self.stalls = [(self.now_s + 2.9, 1.0)] if is_first and isinstance(load, OpenLoop) else []
        return super().measure(candidate, load, seconds, seed)


@pytest.mark.slow
def test_a_stall_of_the_machine_during_each_first_look_rules_nothing_out(
    tune, tiny: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without the second question, the negative control, it rules out nearly everything."""

    def ruled_out(file: str) -> float:
        result: Result = tune(StallsAtFirst(cores=CORES), within=tiny, target=AT_60, budget_s=600, file=file)
        assert result.promise.load == OpenLoop(60.0)
        return sum(row.scored.lost.startswith("p99 of") for row in result.rows) / len(result.rows)

    assert ruled_out("twice") < 0.1
    monkeypatch.setattr(LoadContest, "_is_strange", lambda *_: False)
    assert ruled_out("once") > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("every_s", "own_s"), [(2.5, 0.5), (9.0, 0.6)])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_candidate_that_stands_still_by_itself_is_never_chosen(
    tune, target: Target, every_s: float, own_s: float
) -> None:
    """It is the fastest otherwise."""
    pauses = {True: (every_s, own_s), False: (0.0, 0.0)}
    server = SimulatedServer(cores=CORES, noise=0.02, pauses=lambda each: pauses[fastest(each)])
    result: Result = tune(server, target=target, budget_s=900)
    assert result.candidate is not None
    assert not fastest(result.candidate)


class Moody(SimulatedServer):
    """Each start of a server has its own luck, which lasts until the next one."""

    luck, starts = 1.0, 0

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        if self.served != candidate:
            self.starts += 1
            self.luck = 1.0 + 0.25 * random.Random(self.starts).random()
        found = super().measure(candidate, load, seconds, seed)
        return replace(found, latency=found.latency.scaled(self.luck)) if isinstance(found, Measured) else found


@pytest.mark.slow
def test_searches_of_a_moody_machine_keep_what_serves_today(tune, space: Space) -> None:
    """Nothing that varies matters at this rate."""
    part = only(space, MAX_BATCH_SIZE, {QUEUE_DELAY_US: 0})
    axes = [replace(axis, values=(8, 4, 16)) if axis.key == MAX_BATCH_SIZE else axis for axis in part.axes]
    narrow = replace(part, axes=tuple(axes))

    for seed in range(4):
        server = Moody(cores=CORES, noise=0.03)
        server.starts = seed
        result = tune(server, target=AT_60, within=narrow, budget_s=1000, seed=seed, file=f"{seed}")
        assert result.candidate == narrow.default
        assert all("near-tie" in row.scored.lost for row in result.rows if row.scored.candidate != narrow.default)
