"""YOLO heads for batches, compared with a search image by image, and recognition of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detections import found_by_search, made_boxes

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.operators import keep
from graphkiln_converters.detection.yolo import Settings, corners_of, detect, head_of, recognize, selected
from graphkiln_converters.recipe import BoxFormat, Head

SIZE = (100, 200)
COUNT, CLASSES = 120, 3


def settings(head: Head, **changes: object) -> Settings:
    boxes = BoxFormat.CENTER if head in (Head.YOLOV8, Head.YOLOV5) else BoxFormat.CORNERS
    given: dict[str, object] = {"head": head, "boxes": boxes, "size": SIZE, "iou_threshold": 0.5, "max_detections": 300}
    return Settings(**{**given, **changes})  # type: ignore[arg-type]


def centered(corners: np.ndarray) -> np.ndarray:
    return np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)


def raw(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Corners, class and score of each box; the other classes have lower scores."""
    corners, best = made_boxes(seed=seed, count=COUNT)
    classes = np.random.default_rng(seed).integers(0, CLASSES, COUNT)
    return corners, classes, best


def scores_of(classes: np.ndarray, best: np.ndarray) -> np.ndarray:
    scores = np.repeat(best[:, None] * 0.5, CLASSES, 1)
    scores[np.arange(COUNT), classes] = best
    return scores.astype(np.float32)


def v8(seed: int) -> np.ndarray:
    corners, classes, best = raw(seed)
    return np.concatenate([centered(corners), scores_of(classes, best)], 1).T


def v5(seed: int) -> np.ndarray:
    corners, classes, best = raw(seed)
    objectness = np.full((COUNT, 1), 0.5, np.float32)
    return np.concatenate([centered(corners), objectness, scores_of(classes, np.minimum(2 * best, 2))], 1)


@pytest.mark.parametrize(("head", "made"), [(Head.YOLOV8, v8), (Head.YOLOV5, v5)])
def test_detections_of_a_batch_are_those_of_a_search_by_class(head: Head, made: object) -> None:
    batch = np.stack([made(seed) for seed in (1, 2, 3)]).astype(np.float32)  # type: ignore[operator]
    found = head_of(settings(head))(torch.from_numpy(batch))
    for row, seed in enumerate((1, 2, 3)):
        corners, classes, best = raw(seed)
        expected = []
        for number in range(CLASSES):
            (members,) = np.nonzero((classes == number) & (best > 0.01))
            expected += [members[index] for index in found_by_search(corners[members], best[members], 0.5)]
        expected.sort(key=lambda index: -best[index])
        count = int(found["counts"][row])
        assert count == len(expected) > 10
        np.testing.assert_allclose(found["boxes"][row, :count], corners[expected], atol=1e-3)
        np.testing.assert_allclose(found["scores"][row, :count], best[expected], atol=1e-6)
        np.testing.assert_array_equal(found["classes"][row, :count], classes[expected])
        assert not found["scores"][row, count:].any()


@pytest.mark.parametrize(("head", "made"), [(Head.YOLOV8, v8), (Head.YOLOV5, v5)])
@pytest.mark.parametrize("most", [300, 7])
def test_the_reference_finds_the_same(head: Head, made: object, most: int) -> None:
    batch = np.stack([made(seed) for seed in (4, 5)]).astype(np.float32)  # type: ignore[operator]
    given = settings(head, max_detections=most)
    found, expected = head_of(given)(torch.from_numpy(batch)), detect(batch, given)
    assert expected["boxes"].shape == (2, most, 4)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, err_msg=name)


def test_no_detections_are_a_count_of_zero() -> None:
    found = head_of(settings(Head.YOLOV8))(torch.zeros(2, 7, 20))
    assert found["counts"].tolist() == [0, 0]
    assert found["boxes"].shape == (2, 300, 4)
    assert not found["boxes"].any()


def test_finished_rows_are_sorted_and_counted() -> None:
    rows = torch.tensor([[[1.0, 2, 3, 4, 0.3, 2], [5, 6, 7, 8, 0.9, 1], [0, 0, 0, 0, 0, 0]]])
    given = settings(Head.END_TO_END, max_detections=4)
    found = head_of(given)(rows)
    assert found["counts"].tolist() == [2]
    assert found["classes"].tolist() == [[1, 2, 0, 0]]
    assert found["boxes"][0, 0].tolist() == [5, 6, 7, 8]
    for name, array in detect(rows.numpy(), given).items():
        np.testing.assert_array_equal(found[name], array)


def test_a_selection_is_that_of_the_replaced_node() -> None:
    corners, scores = made_boxes(seed=8, count=40)
    both = np.stack([scores, scores[::-1]])
    given = settings(Head.SELECTED, least_score=0.4, most_of_class=5)
    found = head_of(given)(torch.from_numpy(corners[None]), torch.from_numpy(both[None].copy()))
    chosen = []
    for number, of_class in enumerate(both):
        kept = [index for index in keep(corners, of_class, 0.5) if of_class[index] > 0.4][:5]
        chosen += [(0, number, index) for index in kept]
    expected = selected(corners[None], both[None], [np.array(chosen)], given)
    assert expected["counts"][0] == len(chosen) > 5
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("written", "box"),
    [
        (BoxFormat.CORNERS, (20, 10, 60, 50)),
        (BoxFormat.ROWS_FIRST, (10, 20, 50, 60)),
        (BoxFormat.CENTER, (40, 30, 40, 40)),
        (BoxFormat.UNIT_CORNERS, (0.1, 0.1, 0.3, 0.5)),
        (BoxFormat.UNIT_ROWS_FIRST, (0.1, 0.1, 0.5, 0.3)),
        (BoxFormat.UNIT_CENTER, (0.2, 0.3, 0.2, 0.4)),
    ],
)
def test_every_format_of_boxes(written: BoxFormat, box: tuple[float, ...]) -> None:
    found = corners_of(torch.tensor([box]), written, SIZE)
    np.testing.assert_allclose(found, [[20, 10, 60, 50]], rtol=1e-6)


# The reference of the proof.

SETTINGS = Settings(
    head=Head.YOLOV8, boxes=BoxFormat.CENTER, size=(10, 10), iou_threshold=0.5, max_detections=2, least_score=0.1
)


def test_suppression_is_by_class() -> None:
    rows = np.array([[5, 5, 4, 4, 0.6, 0.0], [5, 5, 4, 4, 0.8, 0.0], [5, 5, 4, 4, 0.0, 0.7]], np.float32)
    found = detect(rows.T[None], SETTINGS)
    assert found["counts"].tolist() == [2]
    np.testing.assert_allclose(found["scores"], [[0.8, 0.7]])
    assert found["classes"].tolist() == [[0, 1]]
    assert found["boxes"][0, 0].tolist() == [3, 3, 7, 7]


# Recognition of heads by the shapes of outputs.

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
def test_a_head_is_recognized_by_its_shape(
    dims: tuple[int, ...], size: tuple[int, int], head: Head, classes: int
) -> None:
    found = recognize({"output0": dims}, size, None)
    assert (found.head, found.output, found.classes) == (head, "output0", classes)
    assert str(head) in str(found)


def test_outputs_of_other_ranks_are_ignored() -> None:
    shapes = {"output": (1, 25200, 85), "350": (1, 3, 80, 80, 85), "416": (1, 3, 40, 40, 85)}
    assert recognize(shapes, LARGE, None).output == "output"


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"a": (1, 252, 6)}, SMALL),  # YOLOv5 of one class, or rows that are done
        ({"a": (1, 84, 8400), "b": (1, 84, 8400)}, LARGE),
    ],
)
def test_ambiguous_outputs_are_refused(shapes: dict[str, tuple[int, ...]], size: tuple[int, int]) -> None:
    with pytest.raises(ConversionError, match="fit several kinds") as caught:
        recognize(shapes, size, None)
    assert "--head yolov8" in caught.value.hint


@pytest.mark.parametrize("dims", [(1, 8400, 85), (1, 100), (1, 84, 8000)])
def test_unknown_outputs_are_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(ConversionError, match="of a supported kind") as caught:
        recognize({"a": dims}, LARGE, None)
    assert "--head" in caught.value.hint


@pytest.mark.parametrize(
    ("head", "dims", "classes"),
    [(Head.YOLOV5, (1, 8400, 85), 80), (Head.YOLOV8, (1, 84, 8000), 80), (Head.END_TO_END, (1, 252, 6), 0)],
)
def test_a_requested_head_is_used(head: Head, dims: tuple[int, ...], classes: int) -> None:
    assert recognize({"a": dims}, LARGE, head).classes == classes


def test_a_requested_head_must_match_an_output() -> None:
    with pytest.raises(ConversionError, match="no output is of the kind end-to-end"):
        recognize({"a": (1, 84, 8400)}, LARGE, Head.END_TO_END)


def test_masks_are_refused() -> None:
    with pytest.raises(ConversionError, match="prototypes of masks"):
        recognize({"output0": (1, 116, 8400), "output1": (1, 32, 160, 160)}, LARGE, None)
