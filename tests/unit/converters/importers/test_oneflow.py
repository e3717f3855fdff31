"""Importing folders saved by OneFlow."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.repository.version import read_version
from graphkiln_converters.importers.oneflow import OneFlowImporter

MODELS = Path(__file__).resolve().parents[3] / "conversion" / "oneflow" / "models.zip"


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version folder with the graph `cnn`, as oneflow-serving had it."""
    with zipfile.ZipFile(MODELS) as archive:
        archive.extractall(tmp_path / "saved", [name for name in archive.namelist() if name.startswith("cnn/")])
    (tmp_path / "saved" / "cnn").rename(tmp_path / "1")
    return tmp_path / "1"


def test_a_saved_graph_is_found(version: Path) -> None:
    assert OneFlowImporter().find_saved(version) == version / "model"


def test_other_folders_are_ignored(tmp_path: Path) -> None:
    assert OneFlowImporter().find_saved(tmp_path) is None
    (tmp_path / "model.mlir").write_text("module {}")
    (tmp_path / "model" / "model.mlir").mkdir(parents=True)
    assert OneFlowImporter().find_saved(tmp_path) is None


def test_a_saved_graph_becomes_a_proven_version(version: Path, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    target.mkdir()
    OneFlowImporter().convert(version / "model", target)
    converted = read_version(target)
    assert converted.manifest is not None
    assert converted.golden is not None
    assert converted.manifest.verification[0].verdict.endswith("PASS")
    assert converted.manifest.signature.batchable
    with np.load(version / "reference.npz") as recorded:
        assert converted.manifest.signature.inputs[0].shape[1:] == recorded["INPUT_0"].shape[1:]


def test_a_failed_conversion_leaves_nothing(version: Path, tmp_path: Path) -> None:
    (version / "model" / "model.mlir").write_text("module { this is no graph }")
    target = tmp_path / "converted"
    target.mkdir()
    with pytest.raises(ConversionError, match=r"model\.mlir"):
        OneFlowImporter().convert(version / "model", target)
    assert list(target.iterdir()) == []


def test_the_search_imports_no_heavy_library() -> None:
    program = "import sys, graphkiln_converters.importers.oneflow; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "onnx", "onnxruntime", "numpy", "pydantic", "lark"} & set(loaded)
