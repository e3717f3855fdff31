"""Every supported detector and segmenter of transformers and torchvision, from its file to a proven version.

Half an hour on two cores (`scripts/test -m families`); the results are in docs/tasks.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converting import Convert
from lively_weights import lively_weights
from tiny_transformers import DETECTORS, LABELS, SEGMENTERS, save_model

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.task import Detection, Segmentation, Task
from graphkiln_converters.sources.torchvision import list_detectors, list_segmenters

pytestmark = [pytest.mark.families, pytest.mark.timeout(1200)]
SIDE = 128
OWN_SIDES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}


def proven(version: Path, task: type[Task], words: str) -> Manifest:
    manifest = Manifest.read(version / MANIFEST_FILE)
    assert isinstance(manifest.task, task)
    assert words in manifest.verification[0].verdict, "the task is not in the proof"
    assert manifest.verification[0].verdict.endswith("PASS")
    assert all(spec.shape[0] == "batch" for spec in manifest.signature.outputs)
    assert manifest.preprocess is not None
    return manifest


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_detector_of_transformers(kind: str, tmp_path: Path, run: Convert) -> None:
    shape = save_model(kind, tmp_path / kind)
    proven(run(f"huggingface:{tmp_path / kind}", shape=[shape]), Detection, "detections matched")


@pytest.mark.parametrize("kind", SEGMENTERS)
def test_a_segmenter_of_transformers(kind: str, tmp_path: Path, run: Convert) -> None:
    shape = save_model(kind, tmp_path / kind)
    manifest = proven(run(f"huggingface:{tmp_path / kind}", shape=[shape]), Segmentation, "pixels")
    assert [spec.shape[1] for spec in manifest.signature.outputs] == [LABELS]


def of_torchvision(name: str, folder: Path, run: Convert) -> Path:
    torch.save(lively_weights(name, OWN_SIDES.get(name, SIDE)), folder / "trained.pth")
    shape = [] if name in OWN_SIDES else [f"3x{SIDE}x{SIDE}"]
    return run(f"torchvision:{name}", weights=str(folder / "trained.pth"), shape=shape)


@pytest.mark.parametrize("name", list_detectors())
def test_a_detector_of_torchvision(name: str, tmp_path: Path, run: Convert) -> None:
    task = proven(of_torchvision(name, tmp_path, run), Detection, "detections matched").task
    assert isinstance(task, Detection)
    parts = (name.startswith("maskrcnn"), name.startswith("keypointrcnn"))
    assert (task.masks is not None, task.keypoints is not None) == parts


@pytest.mark.parametrize("name", list_segmenters())
def test_a_segmenter_of_torchvision(name: str, tmp_path: Path, run: Convert) -> None:
    manifest = proven(of_torchvision(name, tmp_path, run), Segmentation, "pixels")
    assert [spec.shape for spec in manifest.signature.outputs] == [("batch", 21, SIDE, SIDE)]
