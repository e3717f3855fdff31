"""What leaves the networks is what their tasks promise."""

from __future__ import annotations

import torch

from graphkiln.training.scene_networks import DETECTIONS, DigitEmbedding, SceneDetector, SceneSegmenter


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


def test_of_equal_scores_one_is_a_peak() -> None:
    network = SceneDetector(1).eval()
    for layer in (network.heat, network.sides):
        torch.nn.init.zeros_(layer.weight)
    torch.nn.init.constant_(network.heat.bias, 2.0)  # the same everywhere, as integers make it
    with torch.inference_mode():
        *_, counts = network(torch.zeros(1, 1, 96, 96))
    assert counts.tolist() == [1]


def test_a_class_for_each_pixel_and_vectors_of_length_one() -> None:
    with torch.inference_mode():
        assert SceneSegmenter(11).eval()(torch.zeros(1, 1, 96, 96)).shape == (1, 11, 96, 96)
        vectors = DigitEmbedding().eval()(torch.randn(3, 1, 32, 32))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
