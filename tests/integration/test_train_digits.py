"""The training script reproduces the committed example."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest


@pytest.mark.slow
@pytest.mark.train
def test_repeats_the_committed_model(repository: Path, digits: Path, tmp_path: Path) -> None:
    """Accuracy and decisions on the committed golden inputs; bits differ between processors."""
    script = repository / "scripts" / "train-digits"
    finished = subprocess.run(
        [script, "--model-store", tmp_path, "--samples", tmp_path / "samples"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    committed = Manifest.read(digits / "1" / "manifest.json")
    made = Manifest.read(tmp_path / "digits" / "1" / "manifest.json")
    assert made.provenance.metrics["test_accuracy"] >= 0.98
    assert made.provenance.source == committed.provenance.source
    assert made.signature == committed.signature
    assert made.preprocess == committed.preprocess
    for name in ("config.pbtxt", "1/labels.txt"):
        assert (tmp_path / "digits" / name).read_text() == (digits / name).read_text()
    golden, again = (GoldenSamples.read(folder / "1" / "golden.npz") for folder in (digits, tmp_path / "digits"))
    np.testing.assert_array_equal(again.inputs["INPUT_0"], golden.inputs["INPUT_0"])
    decisions = [samples.graph_outputs["OUTPUT_0"].argmax(axis=1) for samples in (golden, again)]
    np.testing.assert_array_equal(*decisions)
    for sample in (repository / "docs" / "digits").glob("*.png"):
        assert (tmp_path / "samples" / sample.name).read_bytes() == sample.read_bytes()


@pytest.mark.slow
@pytest.mark.train
def test_untrained_model_is_not_written(repository: Path, tmp_path: Path) -> None:
    script = repository / "scripts" / "train-digits"
    finished = subprocess.run(
        [script, "--model-store", tmp_path, "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 1
    assert "nothing written" in finished.stderr
    assert list(tmp_path.iterdir()) == []
