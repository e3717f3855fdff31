"""Training of the example models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.proof.tasks import Objects, detection_map
from training.scenes import DigitEmbedding, compose_scenes
from training.train_scenes import (
    DETECTION,
    DETECTOR_GRAPH,
    DetectorTargets,
    committed_detector,
    detector_loss,
    embedding_loss,
    generalized_iou,
    save_scenes,
    scene_samples,
    stroke_loss,
    train_detector,
    train_embedding,
    train_segmenter,
    write_example,
)


def test_untrained_network_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = DigitEmbedding().eval()
    torch.nn.init.zeros_(network.project.weight)
    with pytest.raises(SystemExit, match=r"recall_1 below 0\.95: nothing written"):
        write_example("embedding", network, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_committed_scenes_are_the_held_out_ones(repository: Path, tmp_path: Path) -> None:
    save_scenes(tmp_path)
    committed = {path.name: Image.open(path).tobytes() for path in (repository / "docs" / "scenes").iterdir()}
    assert {path.name: Image.open(path).tobytes() for path in tmp_path.iterdir()} == committed


def test_committed_detector(repository: Path) -> None:
    folder = repository / "model_repository" / "scenes-detector" / "1"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 500_000
    manifest = Manifest.read(folder / "manifest.json")
    assert manifest.preprocess is not None
    scenes = [repository / "docs" / "scenes" / f"{number}.png" for number in (1, 2, 3)]
    samples = np.stack([load_sample(scene, manifest.preprocess) for scene in scenes])
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        outputs = session.run({"INPUT_0": samples})
    objects = [
        Objects(boxes=scene.boxes.astype(np.float64), classes=scene.classes)
        for scene in compose_scenes(3, seed=7, held_out=True)
    ]
    assert detection_map(DETECTION, outputs, objects, iou=0.5) == pytest.approx(1)


# Losses of correct outputs are lower.


def test_detector_loss_of_correct_maps_is_lower() -> None:
    scenes = compose_scenes(2, seed=1)
    targets, rows = DetectorTargets(scenes, 10), torch.arange(2)
    assert int((targets.heat == 1).sum()) == sum(len(scene.classes) for scene in scenes)
    right = torch.logit(targets.heat.clamp(1e-4, 1 - 1e-4))
    good = detector_loss(right, targets.boxes, targets, rows)
    assert good < detector_loss(-right, targets.boxes, targets, rows)
    assert good < detector_loss(right, targets.boxes + 8, targets, rows)


def test_generalized_iou() -> None:
    box = torch.tensor([[0.0, 0, 2, 2]])
    assert generalized_iou(box, box).item() == 1
    # Shared 2 of 6, all inside the hull of 6.
    torch.testing.assert_close(generalized_iou(box, torch.tensor([[1.0, 0, 3, 2]])), torch.tensor([1 / 3]))
    # Apart: a hull of 8 that holds 8 - 8 = 0 less than half.
    torch.testing.assert_close(generalized_iou(box, torch.tensor([[4.0, 0, 6, 2]])), torch.tensor([-1 / 3]))


def test_losses_of_correct_outputs_are_lower() -> None:
    classes = torch.tensor([[[0, 2, 1, 0]]])
    ink = 2.0 * (classes > 0).unsqueeze(1) - 1
    assert stroke_loss(ink, classes) < stroke_loss(-ink, classes)
    directions = torch.eye(3)
    values = torch.tensor([0, 2])
    assert embedding_loss(directions[values], directions, values) < embedding_loss(
        -directions[values], directions, values
    )


# A few training steps.


def test_embedding_training_is_reproducible() -> None:
    first, again = train_embedding(steps=2), train_embedding(steps=2)
    assert torch.equal(first.project.weight, again.project.weight)
    assert not first.training
    assert not torch.equal(first.project.weight, train_embedding(steps=3).project.weight)


def test_detector_training_step() -> None:
    assert torch.isfinite(train_detector(scenes=4, steps=1).heat.weight).all()


def test_committed_detector_equals_graph() -> None:
    samples = scene_samples(compose_scenes(2, seed=5, held_out=True))
    with torch.inference_mode(), OnnxRuntimeEngine().build_reference(DETECTOR_GRAPH) as session:
        network = committed_detector()(samples)
        graph = session.run({"INPUT_0": samples.numpy()})
    for found, expected in zip(network, graph.values(), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_segmenter_training_keeps_detector() -> None:
    detector = committed_detector()
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    network = train_segmenter(scenes=2, steps=2, detector=detector)
    assert all(torch.equal(value, before[name]) for name, value in network.detector.state_dict().items())
