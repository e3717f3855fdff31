"""A module that is imported at its first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph import modules as module
from graphkiln_backend.graph.modules import LazyModule, installed_version, source_digest, version_of


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


# The digest of what decides is another when a module is.


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    source_digest.cache_clear()
    yield
    source_digest.cache_clear()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a/one.py", "a/deep/two.py", "b/three.py", "a/__pycache__/one.cpython-311.pyc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    return tmp_path


def digest(*rooms: str) -> str:
    source_digest.cache_clear()
    return source_digest(*rooms)


@pytest.mark.parametrize("name", ["a/one.py", "a/deep/two.py", "a/new.py"])
def test_a_module_that_changes_changes_it(root: Path, name: str) -> None:
    before = digest("a")
    (root / name).write_text("another rule")
    assert digest("a") != before


@pytest.mark.parametrize("name", ["b/three.py", "a/__pycache__/one.cpython-311.pyc"])
def test_what_decides_nothing_does_not(root: Path, name: str) -> None:
    before = digest("a")
    (root / name).write_text("something else")
    assert digest("a") == before


def test_compiled_modules_count_where_there_is_no_source(root: Path) -> None:
    (root / "a" / "one.py").rename(root / "a" / "one.pyc")
    before = digest("a")
    (root / "a" / "one.pyc").write_text("another rule")
    assert digest("a") != before


def test_our_own_rooms_have_one() -> None:
    assert len({digest("graph"), digest("lowering"), digest("graph", "lowering")}) == 3
