"""Proof of what users read: detections, classes of pixels and vectors, their metrics, and its own controls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Segmentation, Task
from graphkiln_backend.proof import tasks
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits
from graphkiln_backend.proof.tasks import (
    Judgment,
    Objects,
    check_controls,
    class_map,
    cosines,
    decide_pixels,
    decide_vectors,
    detection_map,
    mean_iou,
    measure,
    pixel_controls,
    recall_at_1,
    vector_controls,
)

CASES: Mapping[str, tuple[Task, dict[str, AnyArray]]] = {
    "detection": (DETECTION, detector_outputs()),
    "segmentation": (SEGMENTATION, segmenter_outputs()),
    "class map": (Segmentation(classes="maps"), {"maps": segmenter_outputs()["maps"].argmax(axis=1)}),
    "embedding": (EMBEDDING, embedding_outputs()),
}
ROWS = [EXPORT, OTHER_ENGINE, FP16, BF16, INT8]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limits", ROWS)
def test_equal_outputs_pass(case: str, limits: Limits) -> None:
    task, outputs = CASES[case]
    verdict = prove(outputs, outputs, limits, batch_sizes=(1,), reading=task).verdict
    assert ("matched" in verdict) + ("same class" in verdict) + ("cosine" in verdict) == 1
    assert verdict.endswith("PASS")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limits", ROWS)
def test_proof_refuses_each_control(case: str, limits: Limits) -> None:
    task, outputs = CASES[case]
    changes = list(tasks._controls(task, outputs, limits))
    assert changes
    for _, changed in changes:
        with pytest.raises(VerificationError, match="the outputs changed"):
            prove(outputs, changed, limits, batch_sizes=(1,), reading=task)


@pytest.mark.parametrize("case", CASES)
def test_blind_proof_is_refused_by_its_controls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, outputs = CASES[case]
    monkeypatch.setattr(tasks, "judge", lambda *_arguments, **_options: Judgment(outputs=outputs))
    with pytest.raises(VerificationError, match="cannot tell a changed copy"):
        check_controls(task, outputs, EXPORT)


def test_missing_output() -> None:
    task, outputs = CASES["detection"]
    fewer = {name: array for name, array in outputs.items() if name != "counts"}
    with pytest.raises(VerificationError, match="counts: is missing"):
        prove(outputs, fewer, EXPORT, batch_sizes=(1,), reading=task)


def test_box_scores_are_not_class_scores() -> None:
    task, outputs = CASES["detection"]
    assert "top-1" not in prove(outputs, outputs, INT8, batch_sizes=(1,), reading=task, noise=0.0).verdict


def decision(agreeing: int, *, before: float | None = None, after: float = 0.0, why: str = "") -> TaskDecision:
    metric = None if before is None else Metric(name="mAP", before=before, after=after)
    return TaskDecision(what="boxes", agreeing=agreeing, total=100, least=0.98, metric=metric, inconclusive=why)


def test_agreement_limit() -> None:
    assert decision(98).within(INT8)
    assert not decision(97).within(INT8)


def test_fallen_metric_is_refused() -> None:
    assert not decision(100, before=0.95, after=0.939).within(INT8)
    assert not decision(100, before=0.95, after=0.939).within(BF16)


def test_held_metric_decides_for_int8_only() -> None:
    assert decision(50, before=0.95, after=0.941).within(INT8)
    assert not decision(50, before=0.95, after=0.941).within(BF16)


def test_undecided_samples_are_not_judged() -> None:
    assert decision(50, why="nothing found").within(INT8)
    assert str(decision(50, why="nothing found")) == "boxes not judged: nothing found"


def test_metric_that_cannot_fall_is_ignored() -> None:
    """Labels that fit nothing, a mAP of 0: any graph would have kept it."""
    assert not decision(50, before=0.0, after=0.0).within(INT8)
    assert not decision(50, before=0.01, after=0.0).within(INT8)
    assert decision(98, before=0.0, after=0.0).within(INT8)
    assert decision(50, before=0.02, after=0.01).within(INT8)


DETECTOR = detector_outputs()
OBJECTS = [
    Objects(boxes=boxes[:4].astype(np.float64), classes=classes[:4])
    for boxes, classes in zip(DETECTOR["boxes"], DETECTOR["classes"], strict=True)
]


def test_map_of_a_moved_box() -> None:
    # 40 pixels wide, moved by 4: an overlap of 36 / 44 = 0.818 counts at 0.5, 0.55, ... 0.8: seven of ten steps.
    moved = {**DETECTOR, "boxes": DETECTOR["boxes"] + np.array([4, 0, 4, 0], np.float32)}
    assert detection_map(DETECTION, moved, OBJECTS) == pytest.approx(0.7)
    assert detection_map(DETECTION, moved, OBJECTS, iou=0.5) == pytest.approx(1)


def test_map_without_detections_or_objects() -> None:
    none = {**DETECTOR, "counts": np.zeros_like(DETECTOR["counts"])}
    assert detection_map(DETECTION, none, OBJECTS) == 0
    empty = [Objects(boxes=np.zeros((0, 4)), classes=np.zeros(0, np.int64))] * 3
    with pytest.raises(VerificationError, match="no sample has a labeled object"):
        detection_map(DETECTION, DETECTOR, empty)


def test_mean_iou() -> None:
    right = np.array([[[0, 0], [1, 1]]])
    assert mean_iou(right, right) == 1
    # Class 0: 2 of 3; class 1: 1 of 2.
    assert mean_iou(np.array([[[0, 0], [0, 1]]]), right) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert mean_iou(right, right.repeat(4, axis=1).repeat(4, axis=2)) == 1


def test_recall_at_1() -> None:
    vectors = embedding_outputs()["vectors"]
    assert recall_at_1(vectors, np.repeat([0, 1], 4)) == 1
    assert recall_at_1(vectors, np.arange(8)) == 0


def test_metric_of_each_task() -> None:
    maps = segmenter_outputs()
    detected = measure(DETECTION, DETECTOR, DETECTOR, OBJECTS)
    segmented = measure(SEGMENTATION, maps, maps, maps["maps"].argmax(axis=1))
    embedded = measure(EMBEDDING, embedding_outputs(), embedding_outputs(), np.repeat([0, 1], 4))
    assert [str(metric) for metric in (detected, segmented, embedded)] == [
        "mAP 100.00% instead of 100.00%",
        "mIoU 100.00% instead of 100.00%",
        "recall@1 100.00% instead of 100.00%",
    ]
    assert measure(DETECTION, DETECTOR, DETECTOR, np.arange(3)) is None
    assert measure(None, DETECTOR, DETECTOR, np.arange(3)) is None


MAPS = segmenter_outputs()


def test_near_ties_of_pixels_by_noise() -> None:
    close = {"maps": MAPS["maps"].copy()}
    close["maps"][:, 1, 0, :] = 1.0 - 1e-6
    turned = {"maps": MAPS["maps"].copy()}
    turned["maps"][:, 1, 0, :] = 1.0 + 1e-6
    decision = decide_pixels(SEGMENTATION, close, turned, FP16, noise=1e-5)
    assert (decision.near_ties, decision.agreeing) == (64, decision.total)
    assert decide_pixels(SEGMENTATION, close, turned, FP16, noise=1e-8).agreeing == decision.total - 64


def with_a_pixel(*scores: float) -> dict[str, AnyArray]:
    """The maps, with one pixel of the background that has other scores."""
    maps = MAPS["maps"].copy()
    maps[0, :, 0, 0] = scores
    return {"maps": maps}


NEARLY_TIED = with_a_pixel(1.0, 1.0 - 1e-6, -1.0)


def test_near_ties_of_pixels_in_fp32() -> None:
    """Seen with MaskFormer with random weights: outputs agree within 1.2e-6, and two pixels differ."""
    turned = with_a_pixel(1.0 - 2e-6, 1.0, -1.0)
    verdict = prove(NEARLY_TIED, turned, EXPORT, batch_sizes=(1,), reading=SEGMENTATION).verdict
    assert "2048/2048 (>= 99.8% at 95%), 1 near ties, which a difference of 1e-06 decides" in verdict


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (with_a_pixel(1.0, 0.999, -1.0), with_a_pixel(0.999, 1.0, -1.0)),  # by more than numbers may differ
        (with_a_pixel(1.0, 0.999, -1.0), with_a_pixel(0.0, 5.0, -1.0)),  # a large difference excuses nothing
        (NEARLY_TIED, with_a_pixel(0.0, 0.0, 5.0)),  # a class that was never near, where two others are
        (NEARLY_TIED, with_a_pixel(1.0, np.inf, -1.0)),
    ],
)
def test_fault_of_one_pixel(expected: dict[str, AnyArray], found: dict[str, AnyArray]) -> None:
    decision = decide_pixels(SEGMENTATION, expected, found, EXPORT, noise=0)
    assert (decision.near_ties, decision.within(EXPORT)) == (0, False)


def test_map_of_one_class_is_undecided() -> None:
    plain = {"maps": np.zeros((1, 2, 8, 8), np.float32)}
    plain["maps"][:, 0] = 1
    assert class_map(SEGMENTATION, plain).shape == (1, 8, 8)
    assert "not judged" in str(decide_pixels(SEGMENTATION, plain, plain, INT8, noise=0))
    assert list(pixel_controls(SEGMENTATION, plain, INT8)) == []


VECTORS = embedding_outputs()


def test_worst_cosine_is_reported() -> None:
    ((_, turned),) = vector_controls(EMBEDDING, VECTORS, INT8)
    text = str(decide_vectors(EMBEDDING, VECTORS, turned, INT8))
    assert "7/8" in text
    assert f"{cosines(VECTORS['vectors'], turned['vectors']).min():.7g}" in text
