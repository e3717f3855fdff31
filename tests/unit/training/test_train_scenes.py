"""A network that is not good enough is not written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from graphkiln.training.scene_networks import DigitEmbedding
from graphkiln.training.scenes import compose_scenes
from graphkiln.training.train_scenes import DETECTION, EXAMPLES, compute, save_scenes, write_example
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.proof.metrics import Objects, detection_map


def test_a_network_that_learned_nothing_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = DigitEmbedding().eval()
    torch.nn.init.zeros_(network.project.weight)
    with pytest.raises(SystemExit, match=r"recall_1 below 0\.95: nothing written"):
        write_example("embedding", network, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_outputs_have_the_names_of_the_graph() -> None:
    assert list(compute(DigitEmbedding().eval(), torch.zeros(1, 1, 32, 32))) == ["OUTPUT_0"]
    assert set(EXAMPLES) == {"detector", "segmenter", "embedding"}


def test_the_committed_scenes_are_the_held_out_ones(repository: Path, tmp_path: Path) -> None:
    save_scenes(tmp_path)
    committed = {path.name: Image.open(path).tobytes() for path in (repository / "docs" / "scenes").iterdir()}
    assert {path.name: Image.open(path).tobytes() for path in tmp_path.iterdir()} == committed


def test_the_committed_detector_is_small_and_finds_what_is_on_them(repository: Path) -> None:
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
