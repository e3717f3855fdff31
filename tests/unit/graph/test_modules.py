"""A module that is imported at its first use."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.modules import LazyModule, installed_version, version_of


def test_it_is_imported_when_an_attribute_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = LazyModule("late_module")
    assert "late_module" not in sys.modules
    assert module.VALUE == 3
    monkeypatch.setattr("late_module.VALUE", 4)
    assert module.VALUE == 4
    del sys.modules["late_module"]


def test_a_module_that_is_missing_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="graphkiln_no_such_module"):
        LazyModule("graphkiln_no_such_module").anything  # noqa: B018


# Versions of installed distributions.


def test_the_version_is_that_of_the_distribution() -> None:
    assert version_of("numpy") == np.__version__


def test_one_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(PackageNotFoundError):
        version_of("graphkiln-no-such-distribution")


def test_or_empty_where_that_is_an_answer() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("graphkiln-no-such-distribution") == ""
