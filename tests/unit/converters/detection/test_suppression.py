"""Suppression of batches: as a plain greedy search, as torchvision's, in PyTorch and in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detections import found_by_search, made_boxes

from graphkiln_converters.detection.suppression import keep, suppress
from graphkiln_converters.torch_libraries import import_torchvision

Floats = np.ndarray


@pytest.mark.parametrize("threshold", [0.1, 0.45, 0.7, 1.0])
def test_boxes_are_those_of_a_search_pair_by_pair(threshold: float) -> None:
    boxes, scores = made_boxes(seed=1, count=200)
    expected = found_by_search(boxes, scores, threshold)
    assert keep(boxes, scores, threshold).tolist() == expected
    assert threshold == 1.0 or len(expected) < 200, "nothing was suppressed"


@pytest.mark.parametrize("seed", range(3))
def test_boxes_are_those_of_torchvision(seed: int) -> None:
    torchvision = import_torchvision()
    if not torchvision.extension._has_ops():
        pytest.skip("torchvision's compiled operators are built for another PyTorch")
    boxes, scores = made_boxes(seed=seed, count=300)
    expected = torchvision.ops.nms(torch.from_numpy(boxes), torch.from_numpy(scores), 0.5)
    assert keep(boxes, scores, 0.5).tolist() == expected.tolist()


def test_of_equal_scores_the_first_box_wins() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]], np.float32)
    assert keep(boxes, np.full(3, 0.5, np.float32), 0.5).tolist() == [0, 2]


def test_boxes_without_an_area_suppress_nothing() -> None:
    boxes = np.zeros((3, 4), np.float32)
    assert keep(boxes, np.array([0.3, 0.2, 0.1], np.float32), 0.5).tolist() == [0, 1, 2]


def test_scores_that_are_not_positive_are_no_candidates() -> None:
    boxes, _ = made_boxes(seed=1, count=3)
    assert keep(boxes, np.array([0, -1, 0.1], np.float32), 0.5).tolist() == [2]


def test_a_batch_of_classes_keeps_its_shape() -> None:
    boxes, scores = made_boxes(seed=2, count=60)
    groups = torch.from_numpy(np.stack([boxes, boxes[::-1].copy()]))
    by_class = torch.from_numpy(np.stack([np.stack([scores, scores[::-1]])] * 2))
    kept = suppress(groups, by_class, 0.5)
    assert kept.shape == by_class.shape
    assert torch.nonzero(kept[0, 0]).flatten().tolist() == sorted(found_by_search(boxes, scores, 0.5))
    assert torch.equal(kept[kept > 0], by_class[kept > 0])
