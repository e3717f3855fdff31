"""Paths that mean a version."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.cli.options import version_folder
from graphkiln_backend.graph.errors import RepositoryError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in ("2", "10"):
        (tmp_path / "m" / version).mkdir(parents=True)
        (tmp_path / "m" / version / "model.onnx").touch()
    return tmp_path / "m"


def test_a_version_its_graph_or_the_newest_of_a_model(model: Path) -> None:
    assert version_folder(model / "2") == model / "2"
    assert version_folder(model / "2" / "model.onnx") == model / "2"
    assert version_folder(model) == model / "10"


def test_a_folder_without_versions(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match="has no version folder"):
        version_folder(tmp_path / "empty")
