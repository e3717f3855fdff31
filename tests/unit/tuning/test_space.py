"""The space: candidates, exclusions with reasons, and simplicity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import changed
from tuned import span_everything as span

from graphkiln.tuning.candidate import ENGINE, INSTANCES, MAX_BATCH_SIZE, THREADS, Candidate, Value, default_values
from graphkiln.tuning.space import Axis, Space, bound_of, constraint_of, narrow
from graphkiln.tuning.space import objection as bound_objection
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Failed, SessionTiming
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.model_config import InstanceGroup


def within_two_cores(candidate: Candidate) -> str:
    needed = candidate.number(INSTANCES) * candidate.number(THREADS)
    return f"{needed} threads on 2 cores" if needed > 2 else ""


SPACE = Space(
    axes=(
        Axis(key=ENGINE, values=("onnxruntime", "openvino")),
        Axis(key=INSTANCES, values=(1, 2)),
        Axis(key=THREADS, values=(2, 1, 4)),
    ),
    constraints=(within_two_cores,),
)


def candidate(engine: str, instances: int, threads: int) -> Candidate:
    return Candidate.of({ENGINE: engine, INSTANCES: instances, THREADS: threads})


def test_points_are_candidates_or_exclusions() -> None:
    assert SPACE.points == 12
    assert len(SPACE.candidates) == 6
    assert len(SPACE.exclusions) == 6
    assert {each.candidate for each in SPACE.exclusions}.isdisjoint(SPACE.candidates)
    assert SPACE.reasons() == {"4 threads on 2 cores": 4, "8 threads on 2 cores": 2}


def test_simplicity() -> None:
    order = sorted(
        [candidate("openvino", 2, 1), candidate("onnxruntime", 1, 4), candidate("onnxruntime", 1, 1)],
        key=SPACE.simplicity,
    )
    assert [each[THREADS] for each in order] == [1, 4, 1]
    assert order[-1][ENGINE] == "openvino"


def test_neighbors() -> None:
    assert set(SPACE.neighbors(candidate("onnxruntime", 1, 1))) == {
        candidate("openvino", 1, 1),
        candidate("onnxruntime", 2, 1),
        candidate("onnxruntime", 1, 2),
    }


def test_fixed_key_may_have_a_new_value() -> None:
    fixed = SPACE.fixed({ENGINE: "openvino", INSTANCES: 1})
    assert {each[ENGINE] for each in fixed.candidates} == {"openvino"}
    assert SPACE.fixed({THREADS: 3}).exclusions[0].reason == "3 threads on 2 cores"


# The space of a model on a machine.


def axes(space: Space) -> dict[str, tuple[Value, ...]]:
    return {axis.key: axis.values for axis in space.axes}


def objection(space: Space, **values: Value) -> str:
    return space.objection(space.default.with_values(values))


def test_today_is_the_first_candidate(subject: Subject) -> None:
    spanned = span(subject)
    assert spanned.candidates[0] == spanned.default
    assert {key: values[0] for key, values in axes(spanned).items()} == {
        "engine": "onnxruntime", "precision": "fp32", "threads": subject.deployment.plan.configs[0].threads,
        "streams": 1, "spin": True, "instances": 1, "max_batch_size": 32, "max_queue_delay_us": 0,
    }  # fmt: skip


def test_unavailable_engines_and_precisions_are_left_out(subject: Subject) -> None:
    spanned = span(subject, absent="openvino", lacks="no instructions for it")
    assert axes(spanned)["engine"] == ("onnxruntime",)
    assert axes(spanned)["precision"] == ("fp32",)
    assert "engine openvino: not installed" in spanned.left_out
    assert "precision bf16: no instructions for it" in spanned.left_out
    assert any(line.startswith("precision int8: requires an int8 graph") for line in spanned.left_out)


def test_precision_of_graph_saved_in_int8(subject: Subject) -> None:
    saved = replace(subject, deployment=replace(subject.deployment, saved=Precision.INT8))
    spanned = span(saved)
    assert axes(spanned)["precision"] == ("int8",)
    assert any("the graph is saved in int8" in line for line in spanned.left_out)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda s: changed(s, max_batch_size=0), "the model is served without batches"),
        (lambda s: replace(s, mixing="node mean takes all rows"), "node mean takes all rows"),
    ],
)  # fmt: skip
def test_model_without_batches(subject: Subject, make: object, reason: str) -> None:
    assert callable(make)
    spanned = span(make(subject))
    assert len(axes(spanned)["max_batch_size"]) == 1
    assert len(axes(spanned)["max_queue_delay_us"]) == 1
    assert any(reason in line for line in spanned.left_out)


def test_long_queue_delays_are_left_out(subject: Subject) -> None:
    spanned = span(subject, p99_s=0.002)
    assert set(axes(spanned)["max_queue_delay_us"]) == {0, 100, 500, -1}
    assert any(line.startswith("max_queue_delay_us from 1000") for line in spanned.left_out)


def test_space_on_a_gpu(subject: Subject) -> None:
    group = InstanceGroup(count=1, device=Device.gpu(0))
    spanned = span(changed(subject, instance_groups=(group,)))
    found = axes(spanned)
    assert set(found["engine"]) == {"onnxruntime", "tensorrt"}
    assert "tf32" in found["precision"]
    assert set(found["layout"]) == {"engine's", "nchw", "nhwc"}
    assert len(found["threads"]) == 1
    assert "TensorRT has no layout" in objection(spanned, engine="tensorrt", layout="nhwc", spin=False)
    assert spanned.objection(Candidate.of({**spanned.default.values, "layout": "nhwc"})) == ""


class TestNarrowing:
    @pytest.mark.parametrize(
        ("only", "expected"),
        [
            ("engine", {"engine": "openvino"}),
            ("instances", {"instances": 2, "threads": 1}),
            ("threads", {"threads": 1}),
            ("max_batch_size", {"max_batch_size": 1, "max_queue_delay_us": -1}),
        ],
    )
    def test_dependent_keys_follow(self, subject: Subject, only: str, expected: dict[str, Value]) -> None:
        space = narrow(span(subject), [only], {})
        assert [each for each in space.candidates if expected.items() <= each.values.items()]

    def test_keys_follow_fixed_values(self, subject: Subject) -> None:
        space = narrow(span(subject), ["precision"], {"engine": "openvino"})
        assert {each["precision"] for each in space.candidates} == {"fp32", "bf16", "fp16"}
        assert {each["spin"] for each in space.candidates} == {False}

    def test_unknown_precision_is_refused(self, subject: Subject) -> None:
        with pytest.raises(InvalidInput, match="one of fp32, "):
            narrow(span(subject), [], {"precision": "fp8"})


def test_preferred_batch_sizes(subject: Subject) -> None:
    preferring = changed(subject, preferred_batch_sizes=(4, 8))
    spanned = span(preferring)
    assert axes(spanned)["preferred_batch_sizes"] == ((4, 8), ())
    assert "above max_batch_size" in objection(spanned, max_batch_size=2)
    assert objection(spanned, max_batch_size=2, preferred_batch_sizes=()) == ""
    alone = narrow(spanned, ["max_batch_size"], {})
    assert {1, 2} <= {each["max_batch_size"] for each in alone.candidates}
    assert "preferred_batch_sizes" not in axes(span(subject))


def test_int8_requires_a_graph(subject: Subject, tmp_path: Path) -> None:
    assert "int8" in axes(span(replace(subject, int8=tmp_path)))["precision"]
    refused = span(replace(subject, no_int8="failed its proof"))
    assert "int8" not in axes(refused)["precision"]
    assert "precision int8: failed its proof" in refused.left_out


def test_values_of_keys(subject: Subject) -> None:
    found = axes(span(subject))
    assert set(found["engine"]) == {"onnxruntime", "openvino"}
    assert set(found["precision"]) == {"fp32", "bf16", "fp16"}
    assert {1, 2} <= set(found["threads"])
    assert set(found["max_batch_size"]) == {1, 2, 4, 8, 16, 32, 64}
    assert set(found["max_queue_delay_us"]) == {-1, 0, 100, 500, 2000, 5000, 20000}


# Constraints.


def refusal(subject: Subject, **values: Value) -> str:
    candidate = Candidate.of(default_values(subject)).with_values(values)
    return constraint_of(subject)(candidate)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"threads": 2, "instances": 2, "spin": False}, "threads x instances > 2 cores"),
        ({"precision": "bf16"}, "no bf16 kernels"),
        ({"streams": 2}, "ONNX Runtime has no streams"),
        ({"engine": "openvino"}, "only ONNX Runtime's threads can spin"),
        ({"engine": "openvino", "spin": False, "threads": 1, "streams": 2}, "streams > threads"),
        ({"engine": "openvino", "spin": False, "streams": 2, "max_batch_size": 1, "max_queue_delay_us": -1},
         "streams > max_batch_size"),
        ({"threads": 1}, "a single thread does not spin"),
        ({"threads": 1, "instances": 2}, "spinning threads of several instances"),
        ({"max_queue_delay_us": -1}, "always get a dynamic batcher"),
        ({"max_batch_size": 1}, "no queue delay without batches"),
    ],
)  # fmt: skip
def test_constraints(subject: Subject, values: dict[str, Value], reason: str) -> None:
    assert reason in refusal(subject, **values)


def test_legal_candidates(subject: Subject) -> None:
    openvino = {"engine": "openvino", "spin": False}
    assert refusal(subject, **openvino, precision="bf16", streams=2, threads=2) == ""
    assert refusal(subject, **openvino, threads=1, instances=2) == ""
    assert refusal(subject, max_batch_size=1, max_queue_delay_us=-1) == ""


def test_ensembles_limit_max_batch_size(subject: Subject) -> None:
    step = replace(subject, ensembles={"single": 0, "pipeline": 8})
    assert refusal(step, max_batch_size=8) == refusal(step, max_batch_size=32) == ""
    assert (
        refusal(step, max_batch_size=4) == "max_batch_size is below that of an ensemble: 'pipeline' takes batches of 8"
    )
    assert "pipeline" in refusal(step, max_batch_size=1, max_queue_delay_us=-1)


def test_today_is_always_legal(subject: Subject) -> None:
    odd = changed(subject, instance_groups=(InstanceGroup(count=9, device=subject.config.device),))
    assert default_values(odd)["instances"] == 9
    assert refusal(odd) == ""
    assert "cores" in refusal(odd, max_batch_size=16)


# Bounds from sessions without a server.

TIMING = SessionTiming(batch_s={1: 0.010, 8: 0.045})
TARGET = Target(p99_s=0.05)


def batched(instances: int, batch: int) -> Candidate:
    return Candidate.of({INSTANCES: instances, MAX_BATCH_SIZE: batch})


def test_fastest_batch_bounds_the_rate() -> None:
    assert bound_of(batched(1, 1), TIMING).rate == pytest.approx(1.2 / 0.010)
    assert bound_of(batched(2, 8), TIMING).rate == pytest.approx(1.2 * 2 * 8 / 0.045)
    assert bound_of(batched(1, 1), TIMING).latency_s == pytest.approx(0.010 / 1.2)


def test_unmeasured_batch_sizes_are_extrapolated() -> None:
    assert bound_of(batched(1, 4), TIMING).rate == pytest.approx(1.2 * 4 / 0.025)
    assert bound_of(batched(1, 15), TIMING).rate == pytest.approx(1.2 * 15 / 0.080)
    assert bound_of(batched(1, 8), SessionTiming(batch_s={1: 0.01})).rate == pytest.approx(1.2 * 800)


@pytest.mark.parametrize(
    ("timing", "target", "reason"),
    [
        (TIMING, TARGET, ""),
        (Failed(reason="it did not load"), TARGET, "it did not load"),
        (SessionTiming(batch_s={1: 0.01}, accuracy="0.3 off"), TARGET, "changes the outputs: 0.3 off"),
        (SessionTiming(batch_s={1: 0.01}, accuracy_lost=0.004), Target(p99_s=1, accuracy_floor=0.005), ""),
        (SessionTiming(batch_s={1: 0.01}, accuracy_lost=0.006), Target(p99_s=1, accuracy_floor=0.005), "loses 0.60%"),
        (SessionTiming(batch_s={1: 0.06}), TARGET, ""),  # within the slack
        (SessionTiming(batch_s={1: 0.07}), TARGET, "without a server takes 70 ms"),
        (TIMING, Target(p99_s=0.05, rate=250, objective=Objective.COST), "at most 213 requests"),
    ],
)
def test_objection_to_a_candidate(timing: SessionTiming | Failed, target: Target, reason: str) -> None:
    found = bound_objection(batched(1, 8), timing, target)
    assert reason in found
    assert bool(found) == bool(reason)
