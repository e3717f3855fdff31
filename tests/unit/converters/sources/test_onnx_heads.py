"""How the detections of a graph are read."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.options import BoxFormat, DetectorOptions, Head
from graphkiln_converters.detection.selecting import Selection
from graphkiln_converters.sources.onnx_heads import _box_format, _described, _settings

SELECTION = Selection(
    output="chosen",
    boxes="b",
    scores="s",
    centered=False,
    most_of_class=5,
    iou_threshold=0.5,
    score_threshold=0.1,
)


@pytest.mark.parametrize(("head", "iou"), [(Head.YOLOV8, 0.7), (Head.YOLOV5, 0.45)])
def test_usual_settings_are_those_of_the_family(head: Head, iou: float) -> None:
    made = _settings(head, (64, 64), DetectorOptions())
    assert (made.iou_threshold, made.boxes, made.max_detections) == (iou, BoxFormat.CENTER, 300)
    assert f"overlaps over {iou} suppressed" in _described(made)


def test_what_is_told_comes_first() -> None:
    told = DetectorOptions(iou_threshold=0.2, max_detections=7, boxes=BoxFormat.UNIT_CENTER)
    made = _settings(Head.YOLOV8, (64, 64), told)
    assert (made.iou_threshold, made.max_detections, made.boxes) == (0.2, 7, BoxFormat.UNIT_CENTER)


def test_corners_need_an_order() -> None:
    with pytest.raises(ConversionError, match="in any order") as caught:
        _box_format(SELECTION, DetectorOptions())
    assert "--boxes xyxy" in caught.value.hint
    assert _box_format(SELECTION, DetectorOptions(boxes=BoxFormat.ROWS_FIRST)) is BoxFormat.ROWS_FIRST
