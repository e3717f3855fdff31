"""Comparison of two answers to one request, by their decision and their numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Ranking, Segmentation, Task
from graphkiln_backend.proof import tasks
from graphkiln_backend.proof.answers import AnswerDifference, compare_answers
from graphkiln_backend.proof.policy import BF16, EXPORT, OTHER_ENGINE, Limits

TASKS: dict[str, tuple[Task, dict[str, AnyArray]]] = {
    "detection": (DETECTION, detector_outputs(images=1)),
    "segmentation": (SEGMENTATION, segmenter_outputs()),
    "class map": (Segmentation(classes="maps"), {"maps": segmenter_outputs()["maps"].argmax(axis=1)}),
    "embedding": (EMBEDDING, embedding_outputs()),
}
SCORES = np.array([[0.1, 0.7, 0.2]], np.float32)


def compare(before: AnyArray, after: AnyArray, limits: Limits = OTHER_ENGINE) -> AnswerDifference:
    return compare_answers({"y": before}, {"y": after}, limits, None, ("zero", "one", "two"))


def test_equal_bits() -> None:
    assert compare(SCORES, SCORES.copy()) == AnswerDifference(same=True, equal=True)
    assert compare(np.array(["a"], object), np.array([b"a"], object)).equal
    nan = np.array([[math.nan, 1]], np.float32)
    assert compare(nan, nan.copy()).equal


def test_another_top_class() -> None:
    found = compare(SCORES, SCORES[:, [0, 2, 1]])
    assert not found.same
    assert (found.share, found.text) == (1.0, "one -> two")
    assert not found.within


def test_same_top_class_outside_the_policy() -> None:
    found = compare(SCORES, SCORES * np.float32(1.01))
    assert (found.same, found.equal, found.within) == (True, False, False)
    assert found.text.startswith("y: relative L2 0.01")
    assert compare(SCORES, SCORES * np.float32(1.01), BF16).within


def test_rounding_is_the_same_decision() -> None:
    found = compare(SCORES, np.nextafter(SCORES, np.float32(1)))
    assert (found.same, found.equal, found.within) == (True, False, True)


def test_classes_of_several_rows() -> None:
    before, after = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]], np.eye(3, dtype=np.float32)[[0, 2, 1, 1, 0]]
    found = compare(before, after)
    assert found.share == 0.8
    assert found.text == "one -> two; two -> one; zero -> one; 4 of 5 classes in all"


def test_labels_that_the_graph_returns() -> None:
    reference = {"label": np.array([b"cat"], np.object_), "y": SCORES}
    found = compare_answers(reference, {**reference, "label": np.array([b"dog"], np.object_)}, EXPORT, None)
    assert not found.same
    assert found.text == "label: 100.00% of the elements differ"


def test_ranking_of_the_graph() -> None:
    ranking = Ranking(scores="s", indices="i", labels=("a", "b", "c"))
    reference = {"s": np.array([[0.7, 0.2]], np.float32), "i": np.array([[1, 2]])}
    swapped = {"s": np.array([[0.7, 0.2]], np.float32), "i": np.array([[2, 1]])}
    found = compare_answers(reference, swapped, OTHER_ENGINE, ranking, ranking.labels)
    assert (found.same, found.text) == (False, "b -> c")
    assert compare_answers({"s": reference["s"]}, {"s": swapped["s"]}, OTHER_ENGINE, ranking).equal


def test_plain_numbers_are_decided_by_the_policy() -> None:
    before = np.ones((1, 1), np.float32)
    assert compare(before, before * np.float32(1 + 1e-5)).same
    assert not compare(before, before * np.float32(1.01)).same


@pytest.mark.parametrize(
    "after", [SCORES[:, :2], SCORES.astype(np.float64), np.array([[math.nan, 0.7, 0.2]], np.float32)]
)
def test_answers_that_cannot_be_compared(after: AnyArray) -> None:
    found = compare(SCORES, after)
    assert (found.same, found.within, found.relative_l2) == (False, False, math.inf)


def test_missing_output() -> None:
    assert "is missing" in compare_answers({"y": SCORES}, {"z": SCORES}, EXPORT, None).text


@pytest.mark.parametrize("case", TASKS)
@pytest.mark.parametrize("limits", [OTHER_ENGINE, BF16])
def test_tasks(case: str, limits: Limits) -> None:
    """Each negative control of the proof is another decision."""
    task, outputs = TASKS[case]
    changes = list(tasks._controls(task, outputs, limits))
    assert changes
    for _, changed in changes:
        found = compare_answers(outputs, changed, limits, task)
        assert not found.same
        assert 0 < found.share <= 1
        assert " of " in found.text


def test_detections_in_another_order_are_the_same() -> None:
    outputs = detector_outputs(images=1)
    outputs["scores"][:, :2] = 0.9
    swapped = {name: np.array(array) for name, array in outputs.items()}
    for name in ("boxes", "classes", "masks"):
        swapped[name][:, [0, 1]] = outputs[name][:, [1, 0]]
    found = compare_answers(outputs, swapped, BF16, DETECTION)
    assert found.same


def test_objects_where_nothing_was_found() -> None:
    found = detector_outputs(images=1)
    empty = {name: np.zeros_like(array) for name, array in found.items()}
    assert not compare_answers(empty, found, BF16, DETECTION).same
    assert not compare_answers(found, empty, BF16, DETECTION).same


def test_map_of_one_class_that_becomes_another() -> None:
    maps = segmenter_outputs()
    empty = {"maps": np.zeros_like(maps["maps"])}
    empty["maps"][:, 0] = 1.0
    assert not compare_answers(empty, maps, BF16, SEGMENTATION).same


def test_worst_first() -> None:
    differences = [
        AnswerDifference(same=True, relative_l2=1.0),
        AnswerDifference(same=False, share=0.1, relative_l2=0.1),
        AnswerDifference(same=False, share=0.2, relative_l2=0.1),
        AnswerDifference(same=False, share=0.2, relative_l2=0.2),
    ]
    assert sorted(differences, key=lambda each: each.severity) == differences
