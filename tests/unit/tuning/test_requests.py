"""Requests with reference outputs, and accuracy floors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from recorded import write_record
from task_outputs import DETECTION, detector_outputs

from graphkiln.tuning.requests import (
    MOST_SAMPLES,
    Requests,
    check_floor,
    read_requests,
    samples_needed,
    undecided,
)
from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.errors import ConversionError, InvalidInput
from graphkiln_backend.graph.precision import Precision

LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture
def labelled(tmp_path: Path, repository: Path) -> Path:
    for number, label in ((7, "seven"), (8, "eight"), (9, "three")):
        folder = tmp_path / "samples" / label
        folder.mkdir(parents=True)
        name = {7: "seven", 8: "eight", 9: "nine"}[number]
        Image.open(repository / "docs" / "digits" / f"{name}.png").save(folder / "a.png")
    return tmp_path / "samples"


def test_wrong_outputs_have_an_objection(requests: Requests) -> None:
    swapped = {0: requests.answers[1], 1: requests.answers[0]}
    assert "OUTPUT_0" in requests.objection(swapped, engine="openvino", precision="bf16")
    off = {name: array * np.float32(1.001) for name, array in requests.answers[0].items()}
    assert "relative L2" in requests.objection({0: off}, engine="onnxruntime", precision="fp32")
    assert requests.objection({0: off}, engine="openvino", precision="bf16") == ""


def test_order_of_detections_is_irrelevant() -> None:
    answers = tuple(detector_outputs(images=1) for _ in range(2))
    asked = Requests(origin="test", feeds=({}, {}), answers=answers, saved=Precision.FP32, reading=DETECTION)
    order = [1, 0, 2, 3, 4, 5]
    shuffled = {name: array[:, order] if array.ndim > 1 else array for name, array in answers[0].items()}
    found = {0: shuffled, 1: answers[1]}
    assert asked.objection(found, engine="openvino", precision="fp32") == ""
    assert replace(asked, reading=None).objection(found, engine="openvino", precision="fp32")
    moved = {**shuffled, "boxes": shuffled["boxes"] + np.float32(5)}
    assert "detections" in asked.objection({0: moved}, engine="openvino", precision="fp32")


def test_folders_are_labels(subject: Subject, labelled: Path) -> None:
    contract = replace(subject.deployment.version.contract, labels=LABELS)
    version = replace(subject.deployment.version, contract=contract)
    found = read_requests(replace(subject, deployment=replace(subject.deployment, version=version)), labelled)
    assert found.targets is not None
    assert found.targets.tolist() == [8, 7, 3]
    assert found.accuracy(found.answers) == pytest.approx(2 / 3)


def test_recorded_requests(subject: Subject, tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((5, 2, 1, 32, 32), np.float32)
    write_record(tmp_path, [({"INPUT_0": image}, {}) for image in images])
    requests = read_requests(subject, tmp_path)
    np.testing.assert_array_equal(
        np.concatenate([feeds["INPUT_0"] for feeds in requests.feeds]), np.concatenate(images)
    )
    assert len(requests.answers) == 10
    assert requests.targets is None


def test_requests_are_generated_without_golden_samples(subject: Subject) -> None:
    bare = replace(subject.deployment.version, golden=None, manifest=None)
    found = read_requests(replace(subject, deployment=replace(subject.deployment, version=bare)))
    assert found.origin == "made up"
    assert len(found.feeds) == 8
    assert not np.array_equal(found.feeds[0]["INPUT_0"], found.feeds[1]["INPUT_0"])
    assert found.objection({0: found.answers[0]}, engine="onnxruntime", precision="fp32") == ""


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 3, 32, 32), np.float32), r"wrong size in dimension 1.*\[batch,1,32,32\].*\[1,3,32,32\]"),
        (np.zeros((2, 1, 32, 32), np.uint8), "wrong dtype"),
        (np.zeros((2, 32), np.float32), "wrong rank"),
    ],
)
def test_samples_with_other_shapes_are_refused(
    subject: Subject, tmp_path: Path, array: npt.NDArray[np.generic], reason: str
) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, INPUT_0=array)
    with pytest.raises(ConversionError, match=f"samples.npz do not fit the model: {reason}"):
        read_requests(subject, path)


def test_reason_for_missing_labels(subject: Subject, labelled: Path, requests: Requests) -> None:
    assert requests.unlabelled == "golden samples have none"
    (labelled / "three").rename(labelled / "thre")

    for labels, reason in (((), "the model has no labels"), (LABELS, "'thre' is not a label of the model")):
        contract = replace(subject.deployment.version.contract, labels=labels)
        version = replace(subject.deployment.version, contract=contract)
        asked = replace(subject, deployment=replace(subject.deployment, version=version))
        found = read_requests(asked, labelled)
        assert found.targets is None

        assert found.unlabelled == reason


def test_number_of_samples_read_and_sent(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, INPUT_0=np.zeros((400, 1, 32, 32), np.float32))
    assert len(read_requests(subject, path).feeds) == MOST_SAMPLES
    found = read_requests(subject, path, 300)
    assert (len(found.feeds), len(found.sent)) == (300, 150)


def test_scalars_have_another_shape_on_the_server(requests: Requests) -> None:
    """Triton represents one number per row, such as a number of boxes, as [rows, 1]."""
    feeds = {"image": np.zeros((1, 3), np.float32), "threshold": np.array([0.5], np.float32)}
    outputs = {"boxes": np.zeros((1, 4, 4), np.float32), "count": np.array([2], np.int32)}
    asked = Requests(origin="test", feeds=(feeds,), answers=(outputs,), saved=Precision.FP32, is_batched=True)
    assert {name: array.shape for name, array in asked.request(0).items()} == {"image": (1, 3), "threshold": (1, 1)}
    assert asked.sent[0]["threshold"].shape == (1, 1)
    served = {**outputs, "count": outputs["count"][:, None]}
    assert asked.objection({0: served}, engine="onnxruntime", precision="fp32")
    assert asked.objection({0: asked.answer(0, served)}, engine="onnxruntime", precision="fp32") == ""
    whole = replace(asked, is_batched=False)
    assert whole.request(0)["threshold"].shape == (1,)
    scalar = replace(whole, feeds=({"threshold": np.float32(0.5)},), answers=({"count": np.array(2)},))
    assert scalar.request(0)["threshold"].shape == (1,)
    assert scalar.answer(0, {"count": np.array([2])})["count"].shape == ()
    other = asked.answer(0, {"count": np.zeros((1, 2), np.int32)})
    assert other["count"].shape == (1, 2), "other shapes are unchanged"
    assert requests.is_batched


# Accuracy floors.

PLAIN = Requests(origin="test", feeds=(), answers=(), saved=Precision.FP32, unlabelled="golden samples have none")


def labelled_requests(count: int) -> Requests:
    return replace(PLAIN, targets=np.zeros(count, np.int64), unlabelled="")


@pytest.mark.parametrize(("floor", "count"), [(0.005, 598), (0.01, 299), (0.1, 29)])
def test_samples_needed(floor: float, count: int) -> None:
    """With one sample less, such a loss stays undetected in more than 5% of cases."""
    assert samples_needed(floor) == count
    none_lost = [(1 - floor) ** number for number in (count - 1, count)]
    assert none_lost[0] > 0.05 >= none_lost[1]


def test_too_few_samples_are_a_warning() -> None:

    warning = undecided(labelled_requests(50), 0.005)
    assert "a loss below 5.8%" in warning
    assert "598" in warning
    assert undecided(labelled_requests(598), 0.005) == ""
    assert undecided(labelled_requests(5), None) == ""
    assert undecided(PLAIN, 0.01) == ""


def test_floor_requires_a_classifier() -> None:
    with pytest.raises(InvalidInput, match="does not classify"):
        check_floor(replace(labelled_requests(3), reading=DETECTION), 0.01)
    check_floor(replace(PLAIN, reading=DETECTION), None)
    check_floor(labelled_requests(3), 0.01)


def test_classes_of_the_labelled_output() -> None:
    outputs = {"features": np.array([[9.0, 0.0]]), "scores": np.array([[0.0, 1.0]])}
    asked = Requests(
        origin="test", feeds=({},), answers=(outputs,), saved=Precision.FP32, targets=np.array([1]), output="scores"
    )
    assert asked.accuracy([outputs]) == 1.0
    assert replace(asked, output="").accuracy([outputs]) == 0.0
