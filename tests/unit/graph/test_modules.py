"""Lazy imports, and versions of distributions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.modules import LazyModule, installed_version


def test_module_is_imported_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = LazyModule("late_module")
    assert "late_module" not in sys.modules
    assert module.VALUE == 3
    monkeypatch.setattr("late_module.VALUE", 4)
    assert module.VALUE == 4
    del sys.modules["late_module"]


def test_missing_module() -> None:
    with pytest.raises(ImportError, match="graphkiln_no_such_module"):
        LazyModule("graphkiln_no_such_module").anything  # noqa: B018


# Versions of installed distributions.


def test_installed_version() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("graphkiln-no-such-distribution") == ""
