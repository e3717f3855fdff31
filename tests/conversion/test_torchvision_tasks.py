"""Every detector and segmenter of torchvision, as it is built there, from a file of weights to a proven version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converting import Convert
from lively_weights import lively_weights

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.task import Detection, Segmentation
from graphkiln_converters.sources.torchvision_detection import list_detectors
from graphkiln_converters.sources.torchvision_segmentation import list_segmenters

pytestmark = pytest.mark.slow
SIDE = 128
OWN_SIDES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}


def converted(name: str, folder: Path, run: Convert) -> Manifest:
    side = OWN_SIDES.get(name, SIDE)
    torch.save(lively_weights(name, side), folder / "trained.pth")
    shape = [] if name in OWN_SIDES else [f"3x{SIDE}x{SIDE}"]
    version = run(f"torchvision:{name}", weights=str(folder / "trained.pth"), shape=shape)
    return Manifest.read(version / MANIFEST_FILE)


@pytest.mark.parametrize("name", list_detectors())
def test_a_detector(name: str, tmp_path: Path, run: Convert) -> None:
    manifest = converted(name, tmp_path, run)
    assert isinstance(manifest.task, Detection)
    assert "detections matched" in manifest.verification[0].verdict
    assert manifest.verification[0].verdict.endswith("PASS")
    assert all(spec.shape[0] == "batch" for spec in manifest.signature.outputs)
    parts = (name.startswith("maskrcnn"), name.startswith("keypointrcnn"))
    assert (manifest.task.masks is not None, manifest.task.keypoints is not None) == parts


@pytest.mark.parametrize("name", list_segmenters())
def test_a_segmenter(name: str, tmp_path: Path, run: Convert) -> None:
    manifest = converted(name, tmp_path, run)
    assert isinstance(manifest.task, Segmentation)
    assert "pixels" in manifest.verification[0].verdict
    assert manifest.verification[0].verdict.endswith("PASS")
    assert [spec.shape for spec in manifest.signature.outputs] == [("batch", 21, SIDE, SIDE)]
