"""The examples in `docs/sources` convert with their documented commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

EXAMPLES = ("monai_unet", "segmentation_unet", "ultralytics_yolo")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_converts_with_its_command(name: str, repository: Path, tmp_path: Path) -> None:
    if name == "ultralytics_yolo":  # its OpenCV needs a library of the desktop, which not every machine has
        pytest.importorskip("ultralytics", exc_type=ImportError)
    source = repository / "docs" / "sources" / f"{name}.py"
    (command,) = re.findall(r"^    graphkiln (convert .*)$", source.read_text(), re.MULTILINE)
    finished = subprocess.run(
        [sys.executable, "-m", "graphkiln.cli", *command.split(), "--model-store", tmp_path / "store", "--json"],
        cwd=repository,
        env={**os.environ, "YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "true", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (graph,) = (tmp_path / "store").rglob("model.onnx")
    manifest = json.loads((graph.parent / "manifest.json").read_text())
    assert manifest["verification"][0]["verdict"].endswith("PASS")
    assert (graph.parents[1] / "config.pbtxt").read_text().count("max_batch_size") == 1
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    (image,) = session.get_inputs()
    (scores,) = session.run(None, {image.name: np.zeros((3, *image.shape[1:]), np.float32)})
    assert len(scores) == 3


def test_every_example_is_tested(repository: Path) -> None:
    assert {path.stem for path in (repository / "docs" / "sources").glob("*.py")} == set(EXAMPLES)
