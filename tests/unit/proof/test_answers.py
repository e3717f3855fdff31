"""Two answers to one request, compared by what they decide and by their numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Ranking, Segmentation, Task
from graphkiln_backend.proof import tasks
from graphkiln_backend.proof.answers import AnswerComparison, AnswerDecision, AnswerDifference, limits_between
from graphkiln_backend.proof.policy import BF16, OTHER_ENGINE, Limits

LABELS = ("cat", "dog", "cow")
CLASSES = Contract(labels=LABELS, output="y")


def decide(contract: Contract, first: Any, second: Any, *precisions: Precision) -> AnswerDecision:
    return AnswerComparison(contract, limits_between(precisions)).decide(first, second)


def compare(first: Any, second: Any, limits: Limits = OTHER_ENGINE, contract: Contract = CLASSES) -> AnswerDifference:
    return AnswerComparison(contract, limits).compare(first, second)


def scores(*rows: Any) -> dict[str, np.ndarray]:
    return {"y": np.array(rows, np.float32)}


@pytest.mark.parametrize(
    ("second", "outcome"),
    [
        (scores([0.1, 0.8, 0.1]), "agreed"),
        (scores([0.3, 0.4, 0.3]), "agreed"),  # other numbers, the same class
        (scores([0.5, 0.4, 0.1]), "disagreed"),
        (scores([np.nan, 0.9, 0.1]), "disagreed"),
        (scores([0.1, np.inf, 0.1]), "disagreed"),
        (scores([0.1, 0.8]), "disagreed"),
        (scores([0.1, 0.8, 0.1], [0.1, 0.8, 0.1]), "disagreed"),
        ({"y": np.array([[0.1, 0.8, 0.1]], np.float16)}, "disagreed"),
        ({"z": np.array([[0.1, 0.8, 0.1]], np.float32)}, "disagreed"),
        ({}, "disagreed"),
    ],
)
def test_classes(second: dict[str, np.ndarray], outcome: str) -> None:
    assert decide(CLASSES, scores([0.1, 0.7, 0.2]), second).outcome == outcome


def test_one_row_of_many_differs() -> None:
    first, second = scores(*[[0, 1, 0]] * 9), scores(*[[0, 1, 0]] * 8, [1, 0, 0])
    decision = decide(CLASSES, first, second)
    assert (decision.outcome, decision.first, decision.second) == ("disagreed", "dog 1", "cat 1")


def test_a_tie_within_the_policy_is_undecided() -> None:
    first, second = scores([0.5, 0.50001, 0]), scores([0.50001, 0.5, 0])
    assert decide(CLASSES, first, second).outcome == "undecided"
    assert decide(CLASSES, scores([0.5, 0.52, 0]), second).outcome == "disagreed"
    assert decide(CLASSES, scores([0.5, 0.52, 0]), second, Precision.FP32, Precision.BF16).outcome == "undecided"


def test_scores_of_an_unbatched_model() -> None:
    first, second = {"y": np.array([0.1, 0.9, 0], np.float32)}, {"y": np.array([0.9, 0.1, 0], np.float32)}
    assert decide(CLASSES, first, second).outcome == "disagreed"
    assert decide(CLASSES, first, first).outcome == "agreed"


def test_a_ranking_is_compared_by_its_best_class() -> None:
    contract = Contract(ranking=Ranking(scores="s", indices="i", labels=LABELS))
    first = {"s": np.array([[0.9, 0.05]], np.float32), "i": np.array([[1, 0]])}
    other = {"s": np.array([[0.9, 0.05]], np.float32), "i": np.array([[2, 1]])}
    alike = {"s": np.array([[0.8, 0.1]], np.float32), "i": np.array([[1, 2]])}
    assert decide(contract, first, alike).outcome == "agreed"
    decision = decide(contract, first, other)
    assert (decision.outcome, decision.first, decision.second) == ("disagreed", "dog 0.9", "cow 0.9")


def test_bare_tensors_are_compared_by_the_numeric_policy() -> None:
    first = scores([1, 2, 3])
    assert decide(Contract(), first, scores([1, 2.00001, 3])).outcome == "agreed"
    decision = decide(Contract(), first, scores([1, 2.01, 3]))
    assert decision.outcome == "disagreed"
    assert "relative L2" in decision.second
    assert decide(Contract(), first, scores([1, 2.01, 3]), Precision.FP32, Precision.FP16).outcome == "agreed"
    texts = {"t": np.array([["a", "b"]], object)}
    assert decide(Contract(), texts, texts).outcome == "agreed"
    assert decide(Contract(), texts, {"t": np.array([["a", "c"]], object)}).outcome == "disagreed"


def test_detections() -> None:
    contract, first = Contract(task=DETECTION, labels=LABELS), detector_outputs(images=1)
    moved, swapped, gone, more = (detector_outputs(images=1) for _ in range(4))
    moved["boxes"][:, 0] += 2
    swapped["classes"][:, 0] = 2
    gone["counts"][:] = 2
    assert decide(contract, first, moved).outcome == "agreed"
    assert decide(contract, first, swapped).outcome == "disagreed"
    assert decide(contract, first, gone).outcome == "disagreed"
    weaker = {**first, "scores": first["scores"] - np.float32(0.2)}  # one of four falls below the threshold
    assert decide(contract, first, weaker).outcome == "undecided"
    nothing = {**first, "counts": np.zeros(1, np.int32)}
    assert decide(contract, nothing, nothing).outcome == "agreed"
    assert decide(contract, nothing, more).outcome == "disagreed"
    decision = decide(contract, nothing, more)
    assert decision.first.startswith("0 objects")
    assert "cat 0.95" in decision.second


def test_class_maps() -> None:
    contract, first = Contract(task=SEGMENTATION, labels=LABELS), segmenter_outputs()
    border, other = segmenter_outputs(), segmenter_outputs()
    border["maps"][:, 1, 4:16, 16:17] = 3.0
    other["maps"] = other["maps"][:, [0, 2, 1]]
    assert decide(contract, first, border).outcome == "agreed"
    assert decide(contract, first, other).outcome == "disagreed"
    small, lost = segmenter_outputs(), segmenter_outputs()
    small["maps"][:, 1, :] = lost["maps"][:, 1, :] = 0
    small["maps"][:, 1, 5:9, 5:9] = 3.0  # 1.6% of the pixels
    assert decide(contract, small, lost).outcome == decide(contract, lost, small).outcome == "disagreed"
    flat = {"maps": np.ones_like(first["maps"]) * np.array([2, 1, 0], np.float32)[:, None, None]}
    assert decide(contract, flat, flat).outcome == "agreed"
    assert decide(contract, flat, first).outcome == "disagreed"


def test_vectors() -> None:
    contract, first = Contract(task=EMBEDDING), embedding_outputs()
    assert decide(contract, first, {"vectors": first["vectors"] * 2}).outcome == "agreed"
    decision = decide(contract, first, {"vectors": -first["vectors"]})
    assert (decision.outcome, decision.second) == ("disagreed", "cosine -1")


def test_only_some_outputs_were_asked_for() -> None:
    contract = Contract(task=DETECTION)
    first = {"scores": detector_outputs(images=1)["scores"]}
    assert decide(contract, first, first).outcome == "agreed"
    assert decide(contract, first, {"scores": first["scores"] + np.float32(0.1)}).outcome == "disagreed"


SCORES = scores([0.1, 0.7, 0.2])


def test_equal_bits() -> None:
    assert compare(SCORES, {"y": SCORES["y"].copy(), "other": SCORES["y"]}) == AnswerDifference(same=True, equal=True)
    assert compare({"y": np.array(["a"], object)}, {"y": np.array([b"a"], object)}).equal
    nan = scores([math.nan, 1])
    assert compare(nan, {"y": nan["y"].copy()}).equal


def test_another_top_class() -> None:
    found = compare(SCORES, scores([0.1, 0.2, 0.7]))
    assert (found.same, found.within, found.share, found.text) == (False, False, 1.0, "dog 0.7 -> cow 0.7")
    tie = compare(scores([0.5, 0.50001, 0]), scores([0.50001, 0.5, 0]))
    assert (tie.same, tie.within, tie.text) == (False, True, "dog 0.5 -> cat 0.5")


def test_same_top_class_outside_the_policy() -> None:
    other = {"y": SCORES["y"] * np.float32(1.01)}
    found = compare(SCORES, other)
    assert (found.same, found.equal, found.within) == (True, False, False)
    assert found.text.startswith("y: relative L2 0.01")
    assert compare(SCORES, other, BF16).within


def test_share_of_rows() -> None:
    before, after = (scores(*np.eye(3)[rows]) for rows in ([0, 1, 2, 0, 1], [0, 2, 1, 1, 0]))
    assert compare(before, after).share == 0.8


def test_plain_numbers_and_text_are_decided_by_the_policy() -> None:
    found = compare(SCORES, scores([0.1, 0.2, 0.7]), contract=Contract())
    assert (found.same, found.share) == (False, 1.0)
    assert found.text.startswith("y: relative L2")
    assert compare(SCORES, {"y": SCORES["y"] * np.float32(1 + 1e-5)}, contract=Contract()).same
    texts = ({"label": np.array([text], object)} for text in (b"cat", b"dog"))
    assert compare(*texts, contract=Contract()).text == "label: 100.00% of the elements differ"


@pytest.mark.parametrize(
    "after",
    [
        {"y": SCORES["y"][:, :2]},
        {"y": SCORES["y"].astype(np.float64)},
        scores([math.nan, 0.7, 0.2]),
        {"z": SCORES["y"]},
    ],
)
def test_answers_that_cannot_be_compared(after: dict[str, np.ndarray]) -> None:
    found = compare(SCORES, after)
    assert (found.same, found.within, found.relative_l2, found.share) == (False, False, math.inf, 1.0)


TASKS: dict[str, tuple[Task, dict[str, Any]]] = {
    "detection": (DETECTION, detector_outputs(images=1)),
    "segmentation": (SEGMENTATION, segmenter_outputs()),
    "class map": (Segmentation(classes="maps"), {"maps": segmenter_outputs()["maps"].argmax(axis=1)}),
    "embedding": (EMBEDDING, embedding_outputs()),
}


@pytest.mark.parametrize("case", TASKS)
@pytest.mark.parametrize("limits", [OTHER_ENGINE, BF16])
def test_no_negative_control_of_the_proof_is_within_the_policy(case: str, limits: Limits) -> None:
    task, outputs = TASKS[case]
    changes = list(tasks._controls(task, outputs, limits))
    assert changes
    for _, changed in changes:
        assert not compare(outputs, changed, limits, Contract(task=task)).within


def test_share_of_objects() -> None:
    found = detector_outputs(images=1)
    empty = {name: np.zeros_like(array) for name, array in found.items()}
    contract = Contract(task=DETECTION, labels=LABELS)
    for pair in ((empty, found), (found, empty)):
        assert compare(*pair, BF16, contract).share == 1.0
    found["scores"][:, :2] = 0.9
    swapped = {name: np.array(array) for name, array in found.items()}
    for name in ("boxes", "classes", "masks"):
        swapped[name][:, [0, 1]] = found[name][:, [1, 0]]
    assert compare(found, swapped, BF16, contract).same


def test_worst_first() -> None:
    differences = [
        AnswerDifference(same=True, relative_l2=1.0),
        AnswerDifference(same=False, share=0.1, relative_l2=0.1),
        AnswerDifference(same=False, share=0.2, relative_l2=0.1),
        AnswerDifference(same=False, share=0.2, relative_l2=0.2),
    ]
    assert sorted(differences, key=lambda each: each.severity) == differences
