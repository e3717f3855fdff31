"""Which kind of detector a graph is, by the shapes of its outputs."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.options import Head
from graphkiln_converters.detection.recognition import recognize

LARGE, SMALL = (640, 640), (64, 64)


@pytest.mark.parametrize(
    ("dims", "size", "head", "classes"),
    [
        ((1, 84, 8400), LARGE, Head.YOLOV8, 80),
        ((1, 5, 84), SMALL, Head.YOLOV8, 1),
        ((1, 84, 5040), (384, 640), Head.YOLOV8, 80),
        ((1, 84, 34000), LARGE, Head.YOLOV8, 80),
        ((1, 25200, 85), LARGE, Head.YOLOV5, 80),
        ((1, 252, 8), SMALL, Head.YOLOV5, 3),
        ((1, 300, 6), LARGE, Head.END_TO_END, 0),
        ((1, 84, 84), SMALL, Head.YOLOV8, 80),
    ],
)
def test_a_kind_is_known_by_its_shape(dims: tuple[int, ...], size: tuple[int, int], head: Head, classes: int) -> None:
    found = recognize({"output0": dims}, size, None)
    assert (found.head, found.output, found.classes) == (head, "output0", classes)
    assert str(head) in str(found)


def test_other_outputs_do_not_matter() -> None:
    shapes = {"output": (1, 25200, 85), "350": (1, 3, 80, 80, 85), "416": (1, 3, 40, 40, 85)}
    assert recognize(shapes, LARGE, None).output == "output"


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"a": (1, 252, 6)}, SMALL),  # YOLOv5 of one class, or rows that are done
        ({"a": (1, 84, 8400), "b": (1, 84, 8400)}, LARGE),
    ],
)
def test_what_fits_twice_is_refused_with_what_to_say(shapes: dict[str, tuple[int, ...]], size: tuple[int, int]) -> None:
    with pytest.raises(ConversionError, match="not clear") as caught:
        recognize(shapes, size, None)
    assert "--head yolov8" in caught.value.hint


@pytest.mark.parametrize("dims", [(1, 8400, 85), (1, 100), (1, 84, 8000)])
def test_what_fits_nothing_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(ConversionError, match="of a kind that is known") as caught:
        recognize({"a": dims}, LARGE, None)
    assert "--head" in caught.value.hint


@pytest.mark.parametrize(
    ("head", "dims", "classes"),
    [(Head.YOLOV5, (1, 8400, 85), 80), (Head.YOLOV8, (1, 84, 8000), 80), (Head.END_TO_END, (1, 252, 6), 0)],
)
def test_a_kind_that_is_named_is_believed(head: Head, dims: tuple[int, ...], classes: int) -> None:
    assert recognize({"a": dims}, LARGE, head).classes == classes


def test_a_kind_that_no_output_can_be_is_refused() -> None:
    with pytest.raises(ConversionError, match="no output is of the kind end-to-end"):
        recognize({"a": (1, 84, 8400)}, LARGE, Head.END_TO_END)


def test_masks_are_not_read_as_classes() -> None:
    with pytest.raises(ConversionError, match="prototypes of masks"):
        recognize({"output0": (1, 116, 8400), "output1": (1, 32, 160, 160)}, LARGE, None)
