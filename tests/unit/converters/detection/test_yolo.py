"""Heads of the YOLO kind for batches, beside a plain search image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detections import found_by_search, made_boxes

from graphkiln_converters.detection.options import BoxFormat, Head
from graphkiln_converters.detection.plain import detect, selected
from graphkiln_converters.detection.suppression import keep
from graphkiln_converters.detection.yolo import Settings, corners_of, head_of

SIZE = (100, 200)
COUNT, CLASSES = 120, 3


def settings(head: Head, **changes: object) -> Settings:
    boxes = BoxFormat.CENTER if head in (Head.YOLOV8, Head.YOLOV5) else BoxFormat.CORNERS
    told: dict[str, object] = {"head": head, "boxes": boxes, "size": SIZE, "iou_threshold": 0.5, "max_detections": 300}
    return Settings(**{**told, **changes})  # type: ignore[arg-type]


def centered(corners: np.ndarray) -> np.ndarray:
    return np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)


def raw(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Corners, the class of each and its score; the other classes score less."""
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
def test_a_batch_finds_what_a_search_by_class_finds(head: Head, made: object) -> None:
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
def test_the_reference_of_the_proof_says_the_same(head: Head, made: object, most: int) -> None:
    batch = np.stack([made(seed) for seed in (4, 5)]).astype(np.float32)  # type: ignore[operator]
    told = settings(head, max_detections=most)
    found, expected = head_of(told)(torch.from_numpy(batch)), detect(batch, told)
    assert expected["boxes"].shape == (2, most, 4)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, err_msg=name)


def test_nothing_found_is_a_count_of_none() -> None:
    found = head_of(settings(Head.YOLOV8))(torch.zeros(2, 7, 20))
    assert found["counts"].tolist() == [0, 0]
    assert found["boxes"].shape == (2, 300, 4)
    assert not found["boxes"].any()


def test_three_hundred_objects_are_all_returned() -> None:
    places = torch.arange(300).float() * 10
    rows = torch.stack((places, places, torch.full((300,), 5.0), torch.full((300,), 5.0)), 1)
    scores = torch.linspace(0.2, 0.9, 300).unsqueeze(1)
    found = head_of(settings(Head.YOLOV8))(torch.cat((rows, scores), 1).T.unsqueeze(0))
    assert found["counts"].tolist() == [300]
    assert found["boxes"][0, 0].tolist() == [2987.5, 2987.5, 2992.5, 2992.5]


def test_rows_that_are_done_are_sorted_and_counted() -> None:
    rows = torch.tensor([[[1.0, 2, 3, 4, 0.3, 2], [5, 6, 7, 8, 0.9, 1], [0, 0, 0, 0, 0, 0]]])
    told = settings(Head.END_TO_END, max_detections=4)
    found = head_of(told)(rows)
    assert found["counts"].tolist() == [2]
    assert found["classes"].tolist() == [[1, 2, 0, 0]]
    assert found["boxes"][0, 0].tolist() == [5, 6, 7, 8]
    for name, array in detect(rows.numpy(), told).items():
        np.testing.assert_array_equal(found[name], array)


def test_a_selection_is_what_the_node_itself_would_select() -> None:
    corners, scores = made_boxes(seed=8, count=40)
    both = np.stack([scores, scores[::-1]])
    told = settings(Head.SELECTED, least_score=0.4, most_of_class=5)
    found = head_of(told)(torch.from_numpy(corners[None]), torch.from_numpy(both[None].copy()))
    chosen = []
    for number, of_class in enumerate(both):
        kept = [index for index in keep(corners, of_class, 0.5) if of_class[index] > 0.4][:5]
        chosen += [(0, number, index) for index in kept]
    expected = selected(corners[None], both[None], [np.array(chosen)], told)
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
def test_every_format_means_the_same_box(written: BoxFormat, box: tuple[float, ...]) -> None:
    found = corners_of(torch.tensor([box]), written, SIZE)
    np.testing.assert_allclose(found, [[20, 10, 60, 50]], rtol=1e-6)
