"""Where libraries of custom operators are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering.deployment import find_library


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "model"


def test_the_working_directory_goes_before_the_model(model: Path) -> None:
    (model / "lib.so").touch()
    assert find_library("lib.so", model) == str(model / "lib.so")
    Path("lib.so").touch()
    assert find_library("lib.so", model) == str(model.parent / "here" / "lib.so")


def test_an_absolute_path(model: Path) -> None:
    (model / "lib.so").touch()
    assert find_library(str(model / "lib.so"), model.parent) == str(model / "lib.so")


def test_a_bare_name_is_left_to_the_loader(model: Path) -> None:
    assert find_library("libm.so.6", model) == "libm.so.6"


@pytest.mark.parametrize("name", ["lib/missing.so", "/nowhere/missing.so", ""])
def test_a_missing_one(model: Path, name: str) -> None:
    with pytest.raises(RepositoryError, match="which is missing"):
        find_library(name, model)
