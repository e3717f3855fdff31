"""Candidates, and their translation to config.pbtxt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graphkiln.tuning.candidate import (
    ENGINE,
    INSTANCES,
    PREFERRED,
    SPIN,
    SPIN_ENTRY,
    Candidate,
    changes_of,
    default_values,
    version_of,
)
from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.precision import Precision

CANDIDATE = Candidate.of({INSTANCES: 2, ENGINE: "openvino", PREFERRED: (4, 8), SPIN: False})


def test_format_of_a_candidate() -> None:
    line = "engine=openvino, instances=2, preferred_batch_sizes=4+8, spin=off"
    assert str(CANDIDATE) == line
    assert str(Candidate.of({PREFERRED: ()})) == "preferred_batch_sizes=none"


# From candidates to configurations.


def test_keys_become_config_changes(subject: Subject) -> None:
    values = {"engine": "openvino", "precision": "bf16", "threads": 2, "streams": 2, "spin": False, "instances": 3}
    changes = changes_of(
        Candidate.of({**values, "max_batch_size": 16, "max_queue_delay_us": 500, "preferred_batch_sizes": (4,)}),
        subject,
    )
    assert changes.parameters == {
        "engine": "openvino", "precision": "bf16", "threads": "2", "streams": "2", SPIN_ENTRY: "",
    }  # fmt: skip
    assert (changes.instances, changes.max_batch_size, changes.queue_delay_us) == (3, 16, 500)
    assert changes.preferred_batch_sizes == (4,)


def test_spin_is_a_session_option_of_onnx_runtime(subject: Subject) -> None:
    for spin, text in ((True, "1"), (False, "0")):
        changes = changes_of(Candidate.of({"engine": "onnxruntime", "spin": spin, "streams": 1}), subject)
        assert changes.parameters == {"engine": "onnxruntime", SPIN_ENTRY: text, "streams": ""}


def test_saved_precision_is_not_written(subject: Subject) -> None:
    assert changes_of(Candidate.of({"precision": "fp32"}), subject).parameters == {"precision": ""}
    settings = replace(subject.deployment.settings, precision=Precision.BF16)
    lowered = replace(subject, deployment=replace(subject.deployment, settings=settings))
    assert changes_of(Candidate.of({"precision": "fp32"}), lowered).parameters == {"precision": "fp32"}


def test_several_instance_groups_are_unchanged(subject: Subject) -> None:
    several = replace(subject, single_group=False)
    assert changes_of(Candidate.of(default_values(several)), several).instances is None
    assert changes_of(Candidate.of(default_values(subject)), subject).instances == 1


def test_one_stream_overrides_an_accelerator(subject: Subject) -> None:
    origins = {"streams": "execution accelerator openvino, num_streams"}
    settings = replace(subject.deployment.settings, streams=2, origins=origins)
    foreign = replace(subject, deployment=replace(subject.deployment, settings=settings))
    written = {
        engine: changes_of(Candidate.of({"engine": engine, "streams": 1}), foreign).parameters["streams"]
        for engine in ("openvino", "onnxruntime")
    }
    assert written == {"openvino": "1", "onnxruntime": ""}


def test_int8_is_served_from_another_version(subject: Subject, tmp_path: Path) -> None:
    candidate = Candidate.of({"precision": "int8"})
    assert version_of(candidate, subject) is None
    assert changes_of(candidate, subject).parameters == {"precision": "int8"}
    calibrated = replace(subject, int8=tmp_path)
    assert version_of(candidate, calibrated) == tmp_path
    assert changes_of(candidate, calibrated).parameters == {"precision": ""}
    assert version_of(Candidate.of({"precision": "fp32"}), calibrated) is None
