"""Rules that rule candidates out, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import changed, digits_subject

from graphkiln.tuning.candidate import Candidate, Value, default_values
from graphkiln.tuning.space import constraint_of
from graphkiln.tuning.subject import Subject
from graphkiln_backend.repository.model_config import InstanceGroup


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def objection(subject: Subject, **values: Value) -> str:
    candidate = Candidate.of(default_values(subject)).with_values(values)
    return constraint_of(subject)(candidate)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"threads": 2, "instances": 2, "spin": False}, "threads x instances > 2 cores"),
        ({"precision": "bf16"}, "no bf16 kernels"),
        ({"streams": 2}, "ONNX Runtime computes a batch as a whole"),
        ({"engine": "openvino"}, "only ONNX Runtime's idle threads can spin"),
        ({"engine": "openvino", "spin": False, "threads": 1, "streams": 2}, "streams > threads"),
        ({"engine": "openvino", "spin": False, "streams": 2, "max_batch_size": 1, "max_queue_delay_us": -1},
         "streams > max_batch_size"),
        ({"threads": 1}, "a single thread has no other"),
        ({"threads": 1, "instances": 2}, "several instances that spin"),
        ({"max_queue_delay_us": -1}, "always gets a dynamic batcher"),
        ({"max_batch_size": 1}, "nothing to wait for"),
    ],
)  # fmt: skip
def test_illegal_and_hopeless_points_have_a_reason(subject: Subject, values: dict[str, Value], reason: str) -> None:
    assert reason in objection(subject, **values)


def test_what_is_legal_has_none(subject: Subject) -> None:
    openvino = {"engine": "openvino", "spin": False}
    assert objection(subject, **openvino, precision="bf16", streams=2, threads=2) == ""
    assert objection(subject, **openvino, threads=1, instances=2) == ""
    assert objection(subject, max_batch_size=1, max_queue_delay_us=-1) == ""


def test_a_step_of_an_ensemble_takes_its_batches(subject: Subject) -> None:
    step = replace(subject, ensembles={"single": 0, "pipeline": 8})
    assert objection(step, max_batch_size=8) == objection(step, max_batch_size=32) == ""
    assert objection(step, max_batch_size=4) == "a step of an ensemble takes its batches: 'pipeline' takes batches of 8"
    assert "pipeline" in objection(step, max_batch_size=1, max_queue_delay_us=-1)


def test_what_serves_today_is_measured_whatever_it_is(subject: Subject) -> None:
    odd = changed(subject, instance_groups=(InstanceGroup(count=9, device=subject.config.device),))
    assert default_values(odd)["instances"] == 9
    assert objection(odd) == ""
    assert "cores" in objection(odd, max_batch_size=16)
