"""The digest of what decides is another when a module is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln_backend.graph import source_digest as module
from graphkiln_backend.graph.source_digest import source_digest


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
