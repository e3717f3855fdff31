"""What a user says of a detector's graph."""

from __future__ import annotations

from graphkiln_converters.detection.options import DetectorOptions, Head


def test_only_what_was_given_counts() -> None:
    assert DetectorOptions().given == ()
    assert DetectorOptions(head=Head.YOLOV5, max_detections=10).given == ("--head", "--max-detections")
