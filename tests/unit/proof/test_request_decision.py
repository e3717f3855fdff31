"""Two answers to one request, compared by what they decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.request_decision import RequestComparison, RequestDecision

LABELS = ("cat", "dog", "cow")
CLASSES = Contract(labels=LABELS, output="y")


def compare(contract: Contract, first: Any, second: Any, *precisions: Precision) -> RequestDecision:
    return RequestComparison(contract, precisions or (Precision.FP32,)).compare(first, second)


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
    assert compare(CLASSES, scores([0.1, 0.7, 0.2]), second).outcome == outcome


def test_one_row_of_many_differs() -> None:
    first, second = scores(*[[0, 1, 0]] * 9), scores(*[[0, 1, 0]] * 8, [1, 0, 0])
    decision = compare(CLASSES, first, second)
    assert (decision.outcome, decision.first, decision.second) == ("disagreed", "dog 1", "cat 1")


def test_a_tie_within_the_policy_is_undecided() -> None:
    first, second = scores([0.5, 0.50001, 0]), scores([0.50001, 0.5, 0])
    assert compare(CLASSES, first, second).outcome == "undecided"
    assert compare(CLASSES, scores([0.5, 0.52, 0]), second).outcome == "disagreed"
    assert compare(CLASSES, scores([0.5, 0.52, 0]), second, Precision.FP32, Precision.BF16).outcome == "undecided"


def test_scores_of_an_unbatched_model() -> None:
    first, second = {"y": np.array([0.1, 0.9, 0], np.float32)}, {"y": np.array([0.9, 0.1, 0], np.float32)}
    assert compare(CLASSES, first, second).outcome == "disagreed"
    assert compare(CLASSES, first, first).outcome == "agreed"


def test_a_ranking_is_compared_by_its_best_class() -> None:
    contract = Contract(ranking=Ranking(scores="s", indices="i", labels=LABELS))
    first = {"s": np.array([[0.9, 0.05]], np.float32), "i": np.array([[1, 0]])}
    other = {"s": np.array([[0.9, 0.05]], np.float32), "i": np.array([[2, 1]])}
    alike = {"s": np.array([[0.8, 0.1]], np.float32), "i": np.array([[1, 2]])}
    assert compare(contract, first, alike).outcome == "agreed"
    decision = compare(contract, first, other)
    assert (decision.outcome, decision.first, decision.second) == ("disagreed", "dog 0.9", "cow 0.9")


def test_bare_tensors_are_compared_by_the_numeric_policy() -> None:
    first = scores([1, 2, 3])
    assert compare(Contract(), first, scores([1, 2.00001, 3])).outcome == "agreed"
    decision = compare(Contract(), first, scores([1, 2.01, 3]))
    assert decision.outcome == "disagreed"
    assert "relative L2" in decision.second
    assert compare(Contract(), first, scores([1, 2.01, 3]), Precision.FP32, Precision.FP16).outcome == "agreed"
    texts = {"t": np.array([["a", "b"]], object)}
    assert compare(Contract(), texts, texts).outcome == "agreed"
    assert compare(Contract(), texts, {"t": np.array([["a", "c"]], object)}).outcome == "disagreed"


def test_detections() -> None:
    contract, first = Contract(task=DETECTION, labels=LABELS), detector_outputs(images=1)
    moved, swapped, gone, more = (detector_outputs(images=1) for _ in range(4))
    moved["boxes"][:, 0] += 2
    swapped["classes"][:, 0] = 2
    gone["counts"][:] = 2
    assert compare(contract, first, moved).outcome == "agreed"
    assert compare(contract, first, swapped).outcome == "disagreed"
    assert compare(contract, first, gone).outcome == "disagreed"
    weaker = {**first, "scores": first["scores"] - np.float32(0.2)}  # one of four falls below the threshold
    assert compare(contract, first, weaker).outcome == "undecided"
    nothing = {**first, "counts": np.zeros(1, np.int32)}
    assert compare(contract, nothing, nothing).outcome == "agreed"
    assert compare(contract, nothing, more).outcome == "disagreed"
    decision = compare(contract, nothing, more)
    assert decision.first.startswith("0 objects")
    assert "cat 0.95" in decision.second


def test_class_maps() -> None:
    contract, first = Contract(task=SEGMENTATION, labels=LABELS), segmenter_outputs()
    border, other = segmenter_outputs(), segmenter_outputs()
    border["maps"][:, 1, 4:16, 16:17] = 3.0
    other["maps"] = other["maps"][:, [0, 2, 1]]
    assert compare(contract, first, border).outcome == "agreed"
    assert compare(contract, first, other).outcome == "disagreed"
    small, lost = segmenter_outputs(), segmenter_outputs()
    small["maps"][:, 1, :] = lost["maps"][:, 1, :] = 0
    small["maps"][:, 1, 5:9, 5:9] = 3.0  # 1.6% of the pixels
    assert compare(contract, small, lost).outcome == compare(contract, lost, small).outcome == "disagreed"
    flat = {"maps": np.ones_like(first["maps"]) * np.array([2, 1, 0], np.float32)[:, None, None]}
    assert compare(contract, flat, flat).outcome == "agreed"
    assert compare(contract, flat, first).outcome == "disagreed"


def test_vectors() -> None:
    contract, first = Contract(task=EMBEDDING), embedding_outputs()
    assert compare(contract, first, {"vectors": first["vectors"] * 2}).outcome == "agreed"
    decision = compare(contract, first, {"vectors": -first["vectors"]})
    assert (decision.outcome, decision.second) == ("disagreed", "cosine -1")


def test_only_some_outputs_were_asked_for() -> None:
    contract = Contract(task=DETECTION)
    first = {"scores": detector_outputs(images=1)["scores"]}
    assert compare(contract, first, first).outcome == "agreed"
    assert compare(contract, first, {"scores": first["scores"] + np.float32(0.1)}).outcome == "disagreed"
