"""Scenes, networks and augmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.augmentation import random_affine
from training.scenes import (
    DETECTIONS,
    SIDE,
    DigitEmbedding,
    SceneDetector,
    SceneSegmenter,
    compose_scenes,
    digit_rows,
    relief,
)


def test_boxes_bound_strokes() -> None:
    scenes = compose_scenes(20, seed=1)
    for scene in scenes:
        assert scene.pixels.shape == scene.segmentation.shape == (SIDE, SIDE)
        assert len(scene.boxes) == len(scene.classes) > 0
        for (x1, y1, x2, y2), value in zip(scene.boxes.astype(int), scene.classes, strict=True):
            stroke = scene.segmentation[y1:y2, x1:x2] == value + 1
            assert stroke[0].any()
            assert stroke[-1].any()
            assert stroke[:, 0].any()
            assert stroke[:, -1].any()


def test_seed_repeats_and_another_does_not() -> None:
    first, again, other = (compose_scenes(1, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first.pixels, again.pixels)
    assert not np.array_equal(first.pixels, other.pixels)


def test_held_out_digits_are_disjoint() -> None:
    (training, _), (held_out, _) = digit_rows(held_out=False), digit_rows(held_out=True)
    assert (len(training), len(held_out)) == (1347, 450)


def test_detections_are_sorted_and_padded_with_zeros() -> None:
    torch.manual_seed(1)
    network = SceneDetector(10).eval()
    torch.nn.init.constant_(network.heat.bias, -2.5)
    with torch.inference_mode():
        boxes, scores, classes, counts = network(torch.randn(2, 1, 96, 96))
    assert boxes.shape == (2, DETECTIONS, 4)
    assert (scores.diff(dim=1) <= 0).all()
    assert counts.dtype == torch.int32
    for image, count in enumerate(counts.tolist()):
        assert (scores[image, :count] > 0).all()
        for padding in (boxes, scores, classes):
            assert not padding[image, count:].any()


def test_equal_scores_give_one_peak() -> None:
    network = SceneDetector(1).eval()
    for layer in (network.heat, network.sides):
        torch.nn.init.zeros_(layer.weight)
    torch.nn.init.constant_(network.heat.bias, 2.0)  # the same everywhere, as integers make it
    with torch.inference_mode():
        *_, counts = network(torch.zeros(1, 1, 96, 96))
    assert counts.tolist() == [1]


def test_output_shapes_and_unit_vectors() -> None:
    with torch.inference_mode():
        assert SceneSegmenter(SceneDetector(10)).eval()(torch.zeros(1, 1, 96, 96)).shape == (1, 11, 96, 96)
        vectors = DigitEmbedding().eval()(torch.randn(3, 1, 32, 32))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))


class _Sees(SceneDetector):
    """Always detects a four, and a seven with a higher score."""

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        boxes, scores = torch.zeros(len(pixels), DETECTIONS, 4), torch.zeros(len(pixels), DETECTIONS)
        boxes[:, :2] = torch.tensor([[33.0, 8, 50, 40], [16, 8, 32, 40]])
        scores[:, :2] = torch.tensor([0.9, 0.6])
        classes = torch.zeros(len(pixels), DETECTIONS, dtype=torch.int64)
        classes[:, :2] = torch.tensor([7, 4])
        return boxes, scores, classes, torch.full((len(pixels),), 2, dtype=torch.int32)


def test_segmenter_assigns_ink_to_boxes() -> None:
    network = SceneSegmenter(_Sees(10)).eval()
    network.strokes.forward = lambda levels: levels[:, :1]  # type: ignore[method-assign]
    ink = torch.full((1, 1, 96, 96), -5.0)
    ink[:, :, 20:24] = 2.0  # a line across the image
    with torch.inference_mode():
        line = network(ink).argmax(dim=1)[0]
    row = line[20].tolist()  # class 0 is the background; two pixels around a box belong to it, too
    assert row == [0] * 14 + [5] * 18 + [8] * 20 + [0] * 44
    assert line[20:24].tolist() == [row] * 4
    assert not line[:20].any()
    assert not line[24:].any()


def test_relief() -> None:
    pixels = torch.full((1, 1, 16, 16), 0.9)
    pixels[:, :, 4:10, 4:10] = -0.4
    pixels[:, :, 6, 6], pixels[:, :, 7, 7] = 0.6, 0.1
    boxes = torch.tensor([[[6.0, 6, 8, 8], [0, 0, 16, 16]]])
    found = relief(pixels, boxes, torch.tensor([[0.5, 0.1]]))[0, 0]  # the second one is not sure enough
    torch.testing.assert_close(found[6, 6], torch.tensor(1.0))
    torch.testing.assert_close(found[7, 7], torch.tensor(0.0))
    assert (found < -0.999).sum() == 16 * 16 - 2


IDENTITY = {"angle": 0.0, "scale": (1.0, 1.0), "shift": 0.0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def samples() -> torch.Tensor:
    return torch.rand(3, 1, 8, 8, generator=generator(1))


def test_no_transform_changes_nothing(samples: torch.Tensor) -> None:
    moved = random_affine(samples, 8, **IDENTITY, generator=generator())
    np.testing.assert_allclose(moved.numpy(), samples.numpy(), atol=1e-6)


def test_scale_zooms_about_the_center() -> None:
    image = torch.zeros(1, 1, 8, 8)
    image[:, :, 2:6, 2:6] = 1.0
    zoomed = random_affine(image, 8, angle=0.0, scale=(0.5, 0.5), shift=0.0, generator=generator())
    np.testing.assert_allclose(zoomed[0, 0, 1:7, 1:7].numpy(), 1.0, atol=1e-6)


def test_border_is_replicated() -> None:
    image = torch.full((1, 1, 6, 6), 0.7)
    moved = random_affine(image, 6, angle=0.5, scale=(1.5, 2.0), shift=0.5, generator=generator())
    np.testing.assert_allclose(moved.numpy(), 0.7, atol=1e-6)
