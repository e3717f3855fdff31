"""Each loss falls where the answer is right."""

from __future__ import annotations

import torch

from graphkiln.training.scenes import compose_scenes
from graphkiln.training.train_scenes import (
    DetectorTargets,
    detector_loss,
    embedding_loss,
    generalized_iou,
    stroke_loss,
)


def test_the_right_maps_cost_less_than_others() -> None:
    scenes = compose_scenes(2, seed=1)
    targets, rows = DetectorTargets(scenes, 10), torch.arange(2)
    assert int((targets.heat == 1).sum()) == sum(len(scene.classes) for scene in scenes)
    right = torch.logit(targets.heat.clamp(1e-4, 1 - 1e-4))
    good = detector_loss(right, targets.boxes, targets, rows)
    assert good < detector_loss(-right, targets.boxes, targets, rows)
    assert good < detector_loss(right, targets.boxes + 8, targets, rows)


def test_overlaps_by_hand() -> None:
    box = torch.tensor([[0.0, 0, 2, 2]])
    assert generalized_iou(box, box).item() == 1
    # Shared 2 of 6, all inside the hull of 6.
    torch.testing.assert_close(generalized_iou(box, torch.tensor([[1.0, 0, 3, 2]])), torch.tensor([1 / 3]))
    # Apart: a hull of 8 that holds 8 - 8 = 0 less than half.
    torch.testing.assert_close(generalized_iou(box, torch.tensor([[4.0, 0, 6, 2]])), torch.tensor([-1 / 3]))


def test_right_pixels_and_right_directions_cost_less() -> None:
    classes = torch.tensor([[[0, 2, 1, 0]]])
    ink = 2.0 * (classes > 0).unsqueeze(1) - 1
    assert stroke_loss(ink, classes) < stroke_loss(-ink, classes)
    directions = torch.eye(3)
    values = torch.tensor([0, 2])
    assert embedding_loss(directions[values], directions, values) < embedding_loss(
        -directions[values], directions, values
    )
