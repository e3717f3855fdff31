"""The model to tune, its ensembles, staged stores and int8 graphs."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ir_files import product, save_ir
from task_outputs import DETECTION

from graphkiln.tuning import subject as calibration
from graphkiln.tuning.subject import (
    Subject,
    check_tunable,
    ensembles_of,
    read_subject,
    served_versions,
    stage,
    vanishing_cache,
    with_int8,
)
from graphkiln_backend.graph.errors import InvalidInput, RepositoryError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.config_changes import NO_BATCHER, ConfigChanges
from graphkiln_backend.repository.version import read_version


@pytest.mark.parametrize(
    ("added", "delay"),
    [
        ("max_batch_size: 1", NO_BATCHER),
        ("dynamic_batching { max_queue_delay_microseconds: 700 }", 700),
    ],
)
def test_queue_delay(digits: Path, tmp_path: Path, added: str, delay: int) -> None:
    model = tmp_path / "digits"
    shutil.copytree(digits, model)
    (model / "config.pbtxt").write_text(f'name: "digits" backend: "graphkiln" {added}\n')
    with vanishing_cache() as cache:
        assert read_subject(model / "1", cache).queue_delay_us == delay


def test_openvino_ir_is_refused(tmp_path: Path) -> None:
    version = save_ir(product(), tmp_path / "m" / "1" / "model.xml").parent
    with vanishing_cache() as cache, pytest.raises(RepositoryError, match="is in OpenVINO IR"):
        read_subject(version, cache)


def test_sequence_batching_is_refused(subject: Subject) -> None:
    check_tunable(subject)
    with pytest.raises(RepositoryError, match="sequence_batching"):
        check_tunable(replace(subject, schedules_sequences=True))


def test_served_versions_follow_the_version_policy(digits: Path, subject: Subject, tmp_path: Path) -> None:
    model = tmp_path / "digits"
    for version in ("1", "2", "7"):
        shutil.copytree(digits / "1", model / version)
    (model / "notes").mkdir()
    for policy, served in (("", [7]), ("all {}", [1, 2, 7]), ("latest { num_versions: 2 }", [2, 7])):
        (model / "config.pbtxt").write_text(f"version_policy {{ {policy} }}\n" if policy else "")
        assert served_versions(replace(subject, folder=model)) == served


# Staged stores.


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_staged_store_has_the_changes(subject: Subject) -> None:
    before = digest(subject.folder)
    with stage(subject, ConfigChanges(max_batch_size=4)) as store:
        assert [path.name for path in store.iterdir()] == ["digits"]
        config = read_config(store / "digits" / "config.pbtxt")
        assert config.max_batch_size == 4
        assert "preprocess" in config.parameters
        assert (store / "digits" / "1").resolve() == subject.folder / "1"
    assert not store.exists()
    assert digest(subject.folder) == before


def test_staged_store_with_another_version(subject: Subject, repository: Path) -> None:
    other = repository / "model_repository" / "scenes-detector" / "1"
    with stage(subject, ConfigChanges(), other) as store:
        assert (store / "digits" / "1").resolve() == other
        assert sorted(path.name for path in (store / "digits").iterdir()) == ["1", "config.pbtxt"]


# Ensembles.

ENSEMBLE = """platform: "ensemble"
max_batch_size: {batch}
ensemble_scheduling {{ step [ {{ model_name: "first" model_version: -1 }}, {{ model_name: "last" }} ] }}
"""


def test_ensembles_of_a_model(tmp_path: Path) -> None:
    configs = {
        "first": "max_batch_size: 8\n",
        "pipeline": ENSEMBLE.format(batch=4),
        "single": ENSEMBLE.format(batch=0),
        ".hidden": ENSEMBLE.format(batch=64),
        "broken": "max_batch_size: ???\n",
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    (tmp_path / "bare").mkdir()
    assert ensembles_of(tmp_path / "first") == {"pipeline": 4, "single": 0}
    assert ensembles_of(tmp_path / "pipeline") == {}


# int8 graphs.


def with_contract(subject: Subject, **contract: object) -> Subject:
    """Return the subject with a changed contract."""
    version = subject.deployment.version
    changed = replace(version, contract=replace(version.contract, **contract))  # type: ignore[arg-type]
    return replace(subject, deployment=replace(subject.deployment, version=changed))


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.npz"
    np.savez(path, INPUT_0=np.random.default_rng(1).normal(size=(16, 1, 32, 32)).astype(np.float32))
    return path


@pytest.mark.slow
def test_int8_graph_is_converted_and_proven(subject: Subject, samples: Path, tmp_path: Path) -> None:
    found = with_int8(subject, samples, None, tmp_path / "int8")
    assert found.int8 is not None, found.no_int8
    version = read_version(found.int8)
    assert version.manifest is not None
    assert version.manifest.conversion is not None
    assert version.manifest.conversion.precision == Precision.INT8
    assert [spec.name for spec in version.manifest.signature.inputs] == ["INPUT_0"]
    assert version.contract.labels == subject.deployment.version.contract.labels


def test_int8_graph_that_fails_its_proof_is_left_out(
    subject: Subject, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise VerificationError("the outputs changed", report="top-1 agreement 0.5")

    monkeypatch.setattr(calibration, "_convert", refuse)
    found = with_int8(subject, samples, None, tmp_path)
    assert found.int8 is None

    assert "top-1 agreement 0.5" in found.no_int8


def test_int8_graph_must_have_the_same_tensors(
    subject: Subject, samples: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = repository / "model_repository"
    monkeypatch.setattr(calibration, "_convert", lambda *_: store / "scenes-detector" / "1")
    with pytest.raises(InvalidInput, match="different tensors"):
        with_int8(subject, samples, None, store)


def test_int8_requires_an_fp32_classifier(subject: Subject, samples: Path, tmp_path: Path) -> None:
    half = replace(subject, deployment=replace(subject.deployment, saved=Precision.BF16))

    for refused, reason in ((half, "is bf16"), (with_contract(subject, task=DETECTION), "class scores")):
        with pytest.raises(InvalidInput, match=reason):
            with_int8(refused, samples, None, tmp_path)


def test_staged_store_has_no_version_policy(subject: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.pbtxt").write_text('version_policy { specific { versions: [7] } } name: "digits"')
    for version in ("1", "7"):
        (folder / version).symlink_to(subject.folder / "1")
    with stage(replace(subject, folder=folder), ConfigChanges()) as store:
        assert sorted(path.name for path in (store / "digits").iterdir()) == ["1", "config.pbtxt"]
        assert not read_config(store / "digits" / "config.pbtxt").HasField("version_policy")
