"""A module that is imported at its first use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphkiln_backend.graph.lazy_module import LazyModule


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
