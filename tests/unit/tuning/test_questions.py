"""Requests whose right answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from digits_subject import digits_subject
from PIL import Image
from task_outputs import DETECTION, detector_outputs

from graphkiln.tuning.questions import MOST_SAMPLES, Questions, read_questions
from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Ranking

LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


@pytest.fixture(scope="module")
def questions(subject: Subject) -> Questions:
    return read_questions(subject)


@pytest.fixture
def labelled(tmp_path: Path, repository: Path) -> Path:
    for number, label in ((7, "seven"), (8, "eight"), (9, "three")):
        folder = tmp_path / "samples" / label
        folder.mkdir(parents=True)
        name = {7: "seven", 8: "eight", 9: "nine"}[number]
        Image.open(repository / "docs" / "digits" / f"{name}.png").save(folder / "a.png")
    return tmp_path / "samples"


def test_golden_samples_are_asked_where_there_are_no_others(questions: Questions, subject: Subject) -> None:
    golden = subject.deployment.version.golden
    assert golden
    assert questions.origin == "golden samples"
    assert len(questions.feeds) == len(questions.answers) == golden.count
    assert questions.feeds[0]["INPUT_0"].shape == (1, 1, 32, 32)
    assert questions.targets is None


def test_right_answers_have_no_objection(questions: Questions) -> None:
    found = dict(enumerate(questions.answers))
    assert questions.objection(found, engine="onnxruntime", precision="fp32") == ""
    assert questions.objection({2: questions.answers[2]}, engine="onnxruntime", precision="fp32") == ""


def test_wrong_ones_have(questions: Questions) -> None:
    swapped = {0: questions.answers[1], 1: questions.answers[0]}
    assert "OUTPUT_0" in questions.objection(swapped, engine="openvino", precision="bf16")
    off = {name: array * np.float32(1.001) for name, array in questions.answers[0].items()}
    assert "relative L2" in questions.objection({0: off}, engine="onnxruntime", precision="fp32")
    assert questions.objection({0: off}, engine="openvino", precision="bf16") == ""


def test_what_users_read_is_judged_and_not_the_order_of_detections() -> None:
    answers = tuple(detector_outputs(images=1) for _ in range(2))
    asked = Questions(origin="test", feeds=({}, {}), answers=answers, saved=Precision.FP32, reading=DETECTION)
    order = [1, 0, 2, 3, 4, 5]
    shuffled = {name: array[:, order] if array.ndim > 1 else array for name, array in answers[0].items()}
    found = {0: shuffled, 1: answers[1]}
    assert asked.objection(found, engine="openvino", precision="fp32") == ""
    assert replace(asked, reading=None).objection(found, engine="openvino", precision="fp32")
    moved = {**shuffled, "boxes": shuffled["boxes"] + np.float32(5)}
    assert "detections" in asked.objection({0: moved}, engine="openvino", precision="fp32")


def test_a_folder_of_labelled_images_says_what_is_right(subject: Subject, labelled: Path) -> None:
    contract = replace(subject.deployment.version.contract, labels=LABELS)
    version = replace(subject.deployment.version, contract=contract)
    found = read_questions(replace(subject, deployment=replace(subject.deployment, version=version)), labelled)
    assert found.targets is not None
    assert found.targets.tolist() == [8, 7, 3]
    assert found.accuracy(found.answers) == pytest.approx(2 / 3)


def test_samples_without_labels_have_no_accuracy(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, INPUT_0=np.zeros((5, 1, 32, 32), np.float32))
    found = read_questions(subject, path)
    assert len(found.feeds) == 5
    assert found.feeds[4]["INPUT_0"].shape == (1, 1, 32, 32)
    assert found.accuracy(found.answers) is None
    assert found.unlabelled == f"{path} has none"


def test_samples_that_do_not_fit_are_refused(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, OTHER=np.zeros(3, np.float32))
    with pytest.raises(ConversionError, match="lack input INPUT_0"):
        read_questions(subject, path)


def test_a_bare_graph_gets_requests_that_are_made_up(subject: Subject) -> None:
    bare = replace(subject.deployment.version, golden=None, manifest=None)
    found = read_questions(replace(subject, deployment=replace(subject.deployment, version=bare)))
    assert found.origin == "made up"
    assert len(found.feeds) == 8
    assert not np.array_equal(found.feeds[0]["INPUT_0"], found.feeds[1]["INPUT_0"])
    assert found.objection({0: found.answers[0]}, engine="onnxruntime", precision="fp32") == ""


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((2, 3, 32, 32), np.float32), r"wrong size in dimension 1.*\[batch,1,32,32\].*\[1,3,32,32\]"),
        (np.zeros((2, 1, 32, 32), np.uint8), "wrong dtype"),
        (np.zeros((2, 32), np.float32), "wrong rank"),
    ],
)
def test_samples_of_another_shape_are_refused(
    subject: Subject, tmp_path: Path, array: npt.NDArray[np.generic], told: str
) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, INPUT_0=array)
    with pytest.raises(ConversionError, match=f"samples.npz do not fit the model: {told}"):
        read_questions(subject, path)


def test_who_does_not_say_what_is_right_is_told(subject: Subject, labelled: Path, questions: Questions) -> None:
    assert questions.unlabelled == "golden samples have none"
    (labelled / "three").rename(labelled / "thre")
    for labels, told in (((), "the model has no labels"), (LABELS, "'thre' is no label of the model")):
        contract = replace(subject.deployment.version.contract, labels=labels)
        version = replace(subject.deployment.version, contract=contract)
        asked = replace(subject, deployment=replace(subject.deployment, version=version))
        found = read_questions(asked, labelled)
        assert found.targets is None
        assert found.unlabelled == told


def test_more_samples_are_read_where_their_labels_count_and_few_are_sent(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, INPUT_0=np.zeros((400, 1, 32, 32), np.float32))
    assert len(read_questions(subject, path).feeds) == MOST_SAMPLES
    found = read_questions(subject, path, 300)
    assert (len(found.feeds), len(found.sent)) == (300, 150)


def test_the_classes_are_those_of_the_output_that_labels_name() -> None:
    outputs = {"features": np.array([[9.0, 0.0]]), "scores": np.array([[0.0, 1.0]])}
    asked = Questions(
        origin="test", feeds=({},), answers=(outputs,), saved=Precision.FP32, targets=np.array([1]), output="scores"
    )
    assert asked.accuracy([outputs]) == 1.0
    assert replace(asked, output="").accuracy([outputs]) == 0.0


def test_the_labels_of_an_embedded_ranking_count(subject: Subject, labelled: Path) -> None:
    ranking = Ranking(scores="OUTPUT_0", indices="OUTPUT_1", labels=LABELS)
    contract = replace(subject.deployment.version.contract, labels=(), ranking=ranking)
    version = replace(subject.deployment.version, contract=contract)
    found = read_questions(replace(subject, deployment=replace(subject.deployment, version=version)), labelled)
    assert found.targets is not None
    assert found.targets.tolist() == [8, 7, 3]


def test_a_server_has_no_scalars(questions: Questions) -> None:
    """Triton gives one number for each row, such as how many boxes there are, as [rows, 1], and takes it so."""
    feeds = {"image": np.zeros((1, 3), np.float32), "threshold": np.array([0.5], np.float32)}
    outputs = {"boxes": np.zeros((1, 4, 4), np.float32), "count": np.array([2], np.int32)}
    asked = Questions(origin="test", feeds=(feeds,), answers=(outputs,), saved=Precision.FP32, is_batched=True)
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
    assert other["count"].shape == (1, 2), "what does not fit stays as it is"
    assert questions.is_batched
