"""An int8 graph of the model that is tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from digits_subject import digits_subject
from task_outputs import DETECTION

from graphkiln.tuning import subject as calibration
from graphkiln.tuning.subject import Subject, with_int8
from graphkiln_backend.graph.errors import ConversionError, InvalidInput, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.version import read_version


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def said(subject: Subject, **contract: object) -> Subject:
    """The subject with another contract."""
    version = subject.deployment.version
    changed = replace(version, contract=replace(version.contract, **contract))  # type: ignore[arg-type]
    return replace(subject, deployment=replace(subject.deployment, version=changed))


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.npz"
    np.savez(path, INPUT_0=np.random.default_rng(1).normal(size=(16, 1, 32, 32)).astype(np.float32))
    return path


@pytest.mark.slow
def test_it_is_made_and_proven(subject: Subject, samples: Path, tmp_path: Path) -> None:
    found = with_int8(subject, samples, None, tmp_path / "int8")
    assert found.int8 is not None, found.no_int8
    version = read_version(found.int8)
    assert version.manifest is not None
    assert version.manifest.conversion is not None
    assert version.manifest.conversion.precision == Precision.INT8
    assert [spec.name for spec in version.manifest.signature.inputs] == ["INPUT_0"]
    assert version.contract.labels == subject.deployment.version.contract.labels


def test_one_that_does_not_compute_the_same_is_left_out_with_the_reason(
    subject: Subject, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise VerificationError("the outputs changed", report="top-1 agreement 0.5")

    monkeypatch.setattr(calibration, "_convert", refuse)
    found = with_int8(subject, samples, None, tmp_path)
    assert found.int8 is None
    assert found.no_int8 == "does not compute the same: the outputs changed: top-1 agreement 0.5"


def test_it_takes_and_gives_the_tensors_of_the_model(
    subject: Subject, samples: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = repository / "model_repository"
    for name, fits in (("digits", True), ("scenes-detector", False)):
        monkeypatch.setattr(calibration, "_convert", lambda *_, name=name: store / name / "1")
        if fits:
            assert with_int8(subject, samples, None, store).int8 == store / name / "1"
            continue
        with pytest.raises(InvalidInput, match="other tensors"):
            with_int8(subject, samples, None, store)


def test_what_is_not_saved_in_fp32_or_no_classifier_is_refused(subject: Subject, samples: Path, tmp_path: Path) -> None:
    half = replace(subject, deployment=replace(subject.deployment, saved=Precision.BF16))
    for refused, told in ((half, "was saved in bf16"), (said(subject, task=DETECTION), "more than scores of classes")):
        with pytest.raises(InvalidInput, match=told):
            with_int8(refused, samples, None, tmp_path)


def test_samples_that_are_not_there_are_told(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"none\.npz"):
        with_int8(subject, tmp_path / "none.npz", None, tmp_path / "int8")
