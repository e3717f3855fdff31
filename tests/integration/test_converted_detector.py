"""A detector from PyTorch to the client: `detect` returns what torchvision's own model finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import StartServer
from tiny_detectors import CLASSES, SIDE, tiny_detector

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.task import Detection
from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.detection import torchvision as library
from graphkiln_converters.recipe import Recipe

pytestmark = [pytest.mark.server, pytest.mark.slow]

LABELS = [f"thing {number}" for number in range(CLASSES)]
# Normalization inside of torchvision's detectors.
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def pictures() -> list[Any]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for _ in range(3)]


def found_by_torchvision(picture: Any) -> dict[str, Any]:
    """Boxes, scores and labels of the model with its own resize and normalization, best first."""
    library._complete_torchvision()
    with torch.inference_mode():
        (found,) = tiny_detector("ssd")([torch.from_numpy(picture).permute(2, 0, 1) / 255])
    return {name: tensor.numpy() for name, tensor in found.items()}


def test_detections_equal_torchvision(tmp_path: Path, start_server: StartServer) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    recipe = Recipe(
        source="python:tiny_detectors:batched_ssd",
        name="finder",
        model_store=tmp_path / "store",
        task="detection",
        shape=(f"3x{SIDE}x{SIDE}",),
        preprocess={"resize": [SIDE, SIDE], **IMAGENET},
        labels=tmp_path / "labels.txt",
    )
    manifest = Manifest.read(convert(recipe) / MANIFEST_FILE)
    assert isinstance(manifest.task, Detection)
    assert "detections matched" in manifest.verification[0].verdict, "the proof has not heard of the task"
    server = start_server("--model-store", tmp_path / "store")
    server.wait_ready()
    with Client(server.url) as client:
        answers = list(client.model("finder").detect_many(pictures(), score_threshold=0))
    for picture, answer in zip(pictures(), answers, strict=True):
        expected = found_by_torchvision(picture)
        assert len(answer) == len(expected["scores"]) > 0
        np.testing.assert_allclose([each.score for each in answer], expected["scores"], rtol=1e-4)
        boxes = [(each.box.x1, each.box.y1, each.box.x2, each.box.y2) for each in answer]
        np.testing.assert_allclose(boxes, expected["boxes"], atol=1e-2)
        assert [each.label for each in answer] == [LABELS[number] for number in expected["labels"]]
