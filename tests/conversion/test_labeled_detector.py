"""Conversions of a detector with labeled scenes, proven by COCO's mAP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from converting import MODULES, Convert
from PIL import Image

from graphkiln.story.digits import CLASSES
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Manifest
from training.scenes import compose_scenes

pytestmark = pytest.mark.slow

DETECTOR = f"python:{MODULES.with_name('scene_modules.py')}:scenes"
PREPROCESS = {"resize": [96, 96], "crop": [96, 96], "mean": [0.5], "std": [0.5], "color": "L"}


def save_scenes(folder: Path, count: int, seed: int, moved: int = 0) -> Path:
    """Save scenes with COCO annotations; moved by some pixels for wrong labels."""
    folder.mkdir()
    images, annotations = [], []
    for number, scene in enumerate(compose_scenes(count, seed=seed, held_out=True)):
        Image.fromarray(scene.pixels).save(folder / f"{number:03}.png")
        images.append({"id": number, "file_name": f"{number:03}.png"})
        for (x1, y1, x2, y2), value in zip(scene.boxes.tolist(), scene.classes.tolist(), strict=True):
            box = [x1 + moved, y1, x2 - x1, y2 - y1]
            annotations.append({"id": len(annotations), "image_id": number, "category_id": value, "bbox": box})
    categories = [{"id": value, "name": name} for value, name in enumerate(CLASSES)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(CLASSES))
    return {
        "task": "detection",
        "preprocess": PREPROCESS,
        "labels": str(labels),
        "samples": str(save_scenes(tmp_path / "samples", 32, 11)),
    }


def measured(verdict: str) -> tuple[float, float]:
    """The mAP before and after, in percent."""
    (after, before), *_ = re.findall(r"mAP ([0-9.]+)% instead of ([0-9.]+)%", verdict)
    return float(before), float(after)


def test_the_proof_measures_the_map_of_both(run: Convert, options: dict[str, Any]) -> None:
    verdict = Manifest.read(run(DETECTOR, **options) / "manifest.json").verification[0].verdict
    before, after = measured(verdict)
    assert before == pytest.approx(after, abs=0.1)
    assert before > 50


def test_int8_keeps_the_map_within_a_point(run: Convert, options: dict[str, Any], tmp_path: Path) -> None:
    calibration = str(save_scenes(tmp_path / "calibration", 64, 12))
    version = run(DETECTOR, **options, precision="int8", int8_by="onnxruntime", calibration=calibration)
    manifest = Manifest.read(version / "manifest.json")
    before, after = measured(manifest.verification[1].verdict)
    assert after >= before - 1
    assert manifest.conversion is not None
    integer, products = map(int, re.findall(r"(\d+)/(\d+) products in int8", manifest.conversion.notes[0])[0])
    assert integer >= products - 1


def test_int8_that_loses_the_map_is_refused(run: Convert, options: dict[str, Any], tmp_path: Path) -> None:
    blank = tmp_path / "blank"  # ranges of empty images
    blank.mkdir()
    for number in range(8):
        Image.new("L", (96, 96), 40).save(blank / f"{number}.png")
    with pytest.raises(VerificationError, match="mAP"):
        run(DETECTOR, **options, precision="int8", int8_by="onnxruntime", calibration=str(blank))


def test_bf16_keeps_the_map_within_a_point(run: Convert, options: dict[str, Any]) -> None:
    manifest = Manifest.read(run(DETECTOR, **options, precision="bf16") / "manifest.json")
    before, after = measured(manifest.verification[1].verdict)
    assert after >= before - 1
    assert "detections matched at IoU 0.9" in manifest.verification[1].verdict
