"""What labels say, beside figures that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.proof.tasks import Objects, detection_map, mean_iou, measure, recall_at_1

DETECTOR = detector_outputs()
OBJECTS = [
    Objects(boxes=boxes[:4].astype(np.float64), classes=classes[:4])
    for boxes, classes in zip(DETECTOR["boxes"], DETECTOR["classes"], strict=True)
]


def test_a_box_that_moved_loses_the_strict_steps() -> None:
    # 40 pixels wide, moved by 4: an overlap of 36 / 44 = 0.818 counts at 0.5, 0.55, ... 0.8: seven of ten steps.
    moved = {**DETECTOR, "boxes": DETECTOR["boxes"] + np.array([4, 0, 4, 0], np.float32)}
    assert detection_map(DETECTION, moved, OBJECTS) == pytest.approx(0.7)
    assert detection_map(DETECTION, moved, OBJECTS, iou=0.5) == pytest.approx(1)


def test_no_detection_is_worth_nothing_and_no_object_proves_nothing() -> None:
    none = {**DETECTOR, "counts": np.zeros_like(DETECTOR["counts"])}
    assert detection_map(DETECTION, none, OBJECTS) == 0
    empty = [Objects(boxes=np.zeros((0, 4)), classes=np.zeros(0, np.int64))] * 3
    with pytest.raises(VerificationError, match="no sample has a labeled object"):
        detection_map(DETECTION, DETECTOR, empty)


def test_mean_iou_is_the_mean_over_classes() -> None:
    right = np.array([[[0, 0], [1, 1]]])
    assert mean_iou(right, right) == 1
    # Class 0: 2 of 3; class 1: 1 of 2.
    assert mean_iou(np.array([[[0, 0], [0, 1]]]), right) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert mean_iou(right, right.repeat(4, axis=1).repeat(4, axis=2)) == 1


def test_recall_counts_nearest_neighbours_of_the_same_class() -> None:
    vectors = embedding_outputs()["vectors"]
    assert recall_at_1(vectors, np.repeat([0, 1], 4)) == 1
    assert recall_at_1(vectors, np.arange(8)) == 0


def test_each_task_has_its_metric() -> None:
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
