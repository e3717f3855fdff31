"""What libraries find, image by image, as one batch."""

from __future__ import annotations

import torch

from graphkiln_converters.detection.library import pad_found


def test_detections_are_ranked_cut_and_padded() -> None:
    boxes = torch.arange(12.0).reshape(3, 4)
    scores, labels = torch.tensor([0.2, 0.9, 0.5]), torch.tensor([1, 2, 3])
    some = {"boxes": boxes, "scores": scores, "labels": labels, "masks": torch.ones(3, 1, 2, 2)}
    none = {key: value[:0] for key, value in some.items()}
    found = pad_found([some, none], 2)
    assert found["boxes"][0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert found["classes"].tolist() == [[2, 3], [0, 0]]
    assert found["counts"].tolist() == [2, 0]
    assert found["masks"].shape == (2, 2, 2, 2)
    assert not found["scores"][1].any()


def test_keypoints_are_padded_with_their_scores() -> None:
    found = {"boxes": torch.ones(2, 4), "scores": torch.tensor([0.2, 0.9]), "labels": torch.ones(2)}
    points = {"keypoints": torch.arange(12.0).reshape(2, 2, 3), "keypoints_scores": torch.tensor([[7.0, 8], [9, 10]])}
    padded = pad_found([{**found, **points}], 3)["keypoints"]
    assert padded[0].tolist() == [[[6, 7, 9], [9, 10, 10]], [[0, 1, 7], [3, 4, 8]], [[0, 0, 0], [0, 0, 0]]]
