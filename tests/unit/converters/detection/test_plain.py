"""The reference of the proof: detections read by hand."""

from __future__ import annotations

import numpy as np

from graphkiln_converters.detection.options import BoxFormat, Head
from graphkiln_converters.detection.plain import detect, pad_rows
from graphkiln_converters.detection.yolo import Settings

TOLD = Settings(
    head=Head.YOLOV8, boxes=BoxFormat.CENTER, size=(10, 10), iou_threshold=0.5, max_detections=2, least_score=0.1
)


def test_the_better_of_two_equal_boxes_stays_and_other_classes_are_left_alone() -> None:
    rows = np.array([[5, 5, 4, 4, 0.6, 0.0], [5, 5, 4, 4, 0.8, 0.0], [5, 5, 4, 4, 0.0, 0.7]], np.float32)
    found = detect(rows.T[None], TOLD)
    assert found["counts"].tolist() == [2]
    np.testing.assert_allclose(found["scores"], [[0.8, 0.7]])
    assert found["classes"].tolist() == [[0, 1]]
    assert found["boxes"][0, 0].tolist() == [3, 3, 7, 7]


def test_more_than_there_is_room_for_is_cut_off() -> None:
    box = np.zeros(4, np.float32)
    found = pad_rows([[(box, 0.9, 1), (box, 0.8, 2), (box, 0.7, 3)], []], 2)
    assert found["counts"].tolist() == [2, 0]
    assert found["classes"].tolist() == [[1, 2], [0, 0]]
