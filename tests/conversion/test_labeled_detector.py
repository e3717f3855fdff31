"""A detector converted beside scenes whose digits are known: held to COCO's mAP, in int8, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from converting import MODULES, Convert
from PIL import Image

from graphkiln.story.digits import CLASSES
from graphkiln.training.scenes import compose_scenes
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Manifest

pytestmark = pytest.mark.slow

DETECTOR = f"python:{MODULES.with_name('scene_modules.py')}:scenes"
PREPROCESS = {"resize": [96, 96], "crop": [96, 96], "mean": [0.5], "std": [0.5], "color": "L"}


def save_scenes(folder: Path, count: int, seed: int, moved: int = 0) -> Path:
    """Scenes, and their boxes as COCO has them; moved by some pixels where labels are to be wrong."""
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


def test_the_proof_says_the_map_of_both(run: Convert, options: dict[str, Any]) -> None:
    verdict = Manifest.read(run(DETECTOR, **options) / "manifest.json").verification[0].verdict
    assert "mAP" in verdict
    before, after = (float(part.partition("%")[0]) for part in verdict.partition("mAP ")[2].split("instead of "))
    assert before == pytest.approx(after, abs=0.1)
    assert before > 50


def test_int8_is_held_to_it(run: Convert, options: dict[str, Any], tmp_path: Path) -> None:
    calibration = str(save_scenes(tmp_path / "calibration", 32, 12))
    given = {**options, "precision": "int8", "calibration": calibration}
    try:
        version = run(DETECTOR, **given)
    except VerificationError as error:
        assert "mAP" in str(error) + error.report
        return
    print([each.verdict for each in Manifest.read(version / "manifest.json").verification])
