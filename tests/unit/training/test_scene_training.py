"""A few steps of each training run, and what they are fed."""

from __future__ import annotations

import numpy as np
import torch

from graphkiln.training.scenes import compose_scenes
from graphkiln.training.train_scenes import (
    DETECTOR_GRAPH,
    committed_detector,
    embedding_samples,
    scene_samples,
    to_input,
    train_detector,
    train_embedding,
    train_segmenter,
)
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine


def test_gray_levels_become_minus_one_to_one() -> None:
    samples = to_input([np.array([[0, 255]], np.uint8)])
    assert samples.tolist() == [[[[-1.0, 1.0]]]]


def test_embedding_samples_are_held_out_or_not() -> None:
    samples, values = embedding_samples(held_out=True)
    assert samples.shape == (450, 1, 32, 32)
    assert set(values.tolist()) == set(range(10))


def test_two_steps_change_weights_and_repeat_exactly() -> None:
    first, again = train_embedding(steps=2), train_embedding(steps=2)
    assert torch.equal(first.project.weight, again.project.weight)
    assert not first.training
    assert not torch.equal(first.project.weight, train_embedding(steps=3).project.weight)


def test_a_detector_takes_a_step() -> None:
    assert torch.isfinite(train_detector(scenes=4, steps=1).heat.weight).all()


def test_the_committed_detector_is_the_network_of_its_graph() -> None:
    samples = scene_samples(compose_scenes(2, seed=5, held_out=True))
    with torch.inference_mode(), OnnxRuntimeEngine().build_reference(DETECTOR_GRAPH) as session:
        network = committed_detector()(samples)
        graph = session.run({"INPUT_0": samples.numpy()})
    for found, expected in zip(network, graph.values(), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_segmenter_trains_its_strokes_alone() -> None:
    detector = committed_detector()
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    network = train_segmenter(scenes=2, steps=2, detector=detector)
    assert all(torch.equal(value, before[name]) for name, value in network.detector.state_dict().items())
