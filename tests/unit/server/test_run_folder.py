"""The folder of a server run: what it holds, and that it goes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.run_folder import RunFolder


def test_never_holds_a_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    spaced.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    with RunFolder() as folder:
        assert " " not in str(folder.path)
        assert folder.path.is_dir()
    assert not folder.path.exists()


def test_links_only_stores_that_triton_cannot_take(tmp_path: Path) -> None:
    plain, spaced = tmp_path / "plain", tmp_path / "a store; rm -rf"
    with RunFolder() as folder:
        first, second = folder.link_stores([plain, spaced])
        assert first == plain
        assert second.parent.parent == folder.path
        assert second.readlink() == spaced


def test_holds_the_users_backends_beside_ours(installation: Installation, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    (extra / "mine").mkdir(parents=True)
    with RunFolder() as folder:
        folder.assemble_backends(installation, extra)
        assert {path.name for path in folder.backends.iterdir()} == {
            "python",
            "graphkiln",
            "onnxruntime",
            "oneflow",
            "mine",
        }


def test_an_installed_oneflow_backend_keeps_its_seat(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "extra" / "oneflow").mkdir(parents=True)
    with RunFolder() as folder:
        assert "oneflow" not in folder.assemble_backends(installation, tmp_path / "extra")
        assert (folder.backends / "oneflow").resolve() == (tmp_path / "extra" / "oneflow").resolve()
