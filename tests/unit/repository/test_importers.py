"""Graphs of other frameworks, found by importers that are installed as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.importers import GROUP, find_foreign_graph, load_importers
from graphkiln_backend.repository.version import find_graph, has_own_graph


class FirstImporter:
    """Finds saved graphs in `first/`."""

    kind = "first"
    framework = "First"
    distributions = ("graphkiln",)

    def find_saved(self, version: Path) -> Path | None:
        saved = version / self.kind
        return saved if saved.is_dir() else None

    def convert(self, saved: Path, target: Path) -> None:
        raise NotImplementedError


class SecondImporter(FirstImporter):
    kind = "second"
    framework = "Second"


def install(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """Stands in for distributions that declare these entry points."""
    entries = [EntryPoint(name, value, GROUP) for name, value in found.items()]

    def entry_points(*, group: str) -> list[Any]:
        return [entry for entry in entries if entry.group == group]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, z=f"{__name__}:FirstImporter", a=f"{__name__}:SecondImporter")


class TestLoading:
    @pytest.mark.usefixtures("both")
    def test_importers_are_sorted_by_name(self) -> None:
        assert [importer.kind for importer in load_importers()] == ["second", "first"]

    def test_broken_importer_is_skipped(self, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
        install(monkeypatch, absent="nowhere_at_all:Importer", first=f"{__name__}:FirstImporter")
        assert [importer.kind for importer in load_importers()] == ["first"]
        assert len(logged) == 1
        assert "'absent'" in logged[0]


@pytest.mark.usefixtures("both")
class TestFinding:
    @pytest.mark.parametrize("kind", ["first", "second"])
    def test_matching_importer_is_found(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / kind).mkdir()
        found = find_foreign_graph(tmp_path)
        assert found
        assert (found.saved, found.importer.kind) == (tmp_path / kind, kind)


@pytest.mark.usefixtures("both")
class TestForeignVersions:
    def test_error_names_the_convert_command(self, tmp_path: Path) -> None:
        (tmp_path / "second").mkdir()
        with pytest.raises(RepositoryError) as caught:
            find_graph(tmp_path)
        assert "saved by Second" in caught.value.message
        assert f"graphkiln convert second:{tmp_path / 'second'}" in caught.value.hint

    @pytest.mark.parametrize("name", ["model.onnx", "manifest.json"])
    def test_own_graph_takes_precedence(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "second").mkdir()
        assert not has_own_graph(tmp_path)
        (tmp_path / name).write_bytes(b"")
        assert has_own_graph(tmp_path)
        with pytest.raises(RepositoryError, match=r"there is no other\.onnx in"):
            find_graph(tmp_path, "other.onnx")
