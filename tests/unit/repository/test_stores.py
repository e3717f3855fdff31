"""Scans of model stores: models, versions, and stamps that change with their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln_backend.repository.stores import model_folders, scan_stores


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in (1, 2):
        (tmp_path / "store" / "m" / str(version)).mkdir(parents=True)
        (tmp_path / "store" / "m" / str(version) / "model.onnx").write_bytes(b"graph")
    (tmp_path / "store" / "m" / "config.pbtxt").write_text("")
    return tmp_path / "store"


def test_models_and_versions(store: Path) -> None:
    (store / ".new").mkdir()
    (store / "README.md").write_text("")
    (store / "m" / "configs").mkdir()
    (store / "m" / "007").mkdir()
    found = scan_stores([store])
    assert list(found) == ["m"]
    assert (found["m"].name, list(found["m"].versions), found["m"].problem) == ("m", [1, 2], "")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model.onnx").write_bytes(b"another"),
        lambda folder: (folder / "weights.bin").write_bytes(b""),
        lambda folder: (folder / "model.onnx").unlink(),
        lambda folder: os.utime(folder / "model.onnx", ns=(5, 5)),
    ],
)
def test_stamp_changes_with_the_files(store: Path, change: object) -> None:
    before = scan_stores([store])["m"]
    assert callable(change)
    change(store / "m" / "2")
    after = scan_stores([store])["m"]
    assert after.versions[1] == before.versions[1]
    assert after.versions[2] != before.versions[2]
    assert after.stamp == before.stamp


def test_compiled_code_does_not_change_the_stamp(store: Path) -> None:
    """Triton's Python backend compiles a `model.py` when it loads it."""
    before = scan_stores([store])["m"]
    for folder in (store / "m" / "2", store / "m"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"code")
    assert scan_stores([store])["m"] == before


def test_config_and_labels_belong_to_the_model(store: Path) -> None:
    before = scan_stores([store])["m"]
    (store / "m" / "labels.txt").write_text("red\n")
    after = scan_stores([store])["m"]
    assert after.stamp != before.stamp
    assert after.versions == before.versions


def test_linked_file_changes_the_stamp(store: Path, tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(b"one")
    (store / "m" / "2" / "weights").symlink_to(tmp_path / "held")
    before = scan_stores([store])["m"]
    (tmp_path / "held").write_bytes(b"another")
    assert scan_stores([store])["m"].versions[2] != before.versions[2]


def test_dangling_and_circular_links(store: Path) -> None:
    (store / "m" / "2" / "nowhere").symlink_to("/nowhere")
    assert scan_stores([store])["m"].problem == ""
    (store / "m" / "2" / "back").symlink_to(store)
    found = scan_stores([store])["m"]
    assert "cannot be read" in found.faults[2]
    assert (list(found.faults), found.problem) == ([2], "")


def test_link_to_itself(store: Path) -> None:
    before = scan_stores([store])["m"].versions
    (store / "m" / "7").symlink_to(store / "m" / "7")
    found = scan_stores([store])["m"]
    assert (found.versions, found.problem) == (before, "")


def test_fifo_is_reported(store: Path) -> None:
    os.mkfifo(store / "m" / "1" / "manifest.json")
    assert "manifest.json is neither a file nor a folder" in scan_stores([store])["m"].faults[1]
    os.mkfifo(store / "m" / "config.pbtxt.new")
    assert "config.pbtxt.new is neither a file nor a folder" in scan_stores([store])["m"].problem


def test_model_in_two_stores(store: Path, tmp_path: Path) -> None:
    (tmp_path / "second" / "m" / "1").mkdir(parents=True)
    (tmp_path / "second" / "n" / "1").mkdir(parents=True)
    found = scan_stores([store, tmp_path / "second"])
    assert "two stores" in found["m"].problem
    assert found["n"].problem == ""


def test_model_without_versions(store: Path) -> None:
    (store / "broken").mkdir()
    (store / "broken" / "config.pbtxt").touch()
    assert "has no version folder: make broken/1" in scan_stores([store])["broken"].problem
    (store / "broken" / "m" / "1").mkdir(parents=True)
    assert "is a model store, not a model" in scan_stores([store])["broken"].problem


def test_other_folders_are_logged_once(store: Path, tmp_path: Path, logged: list[str]) -> None:
    for place in (store, tmp_path / "second"):
        (place / "empty").mkdir(parents=True)
    (store / "my notes").mkdir()
    (store / "my notes" / "README.md").touch()
    for _ in range(2):
        assert list(scan_stores([store, tmp_path / "second"])) == ["m"]
    assert [line.partition(" is ignored: ")[0] for line in logged] == [
        str(store / "empty"),
        str(store / "my notes"),
        str(tmp_path / "second" / "empty"),
    ]
    (store / "empty" / "1").mkdir()
    assert list(scan_stores([store])) == ["empty", "m"]


def test_missing_store(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        scan_stores([tmp_path / "nowhere"])


def test_unsafe_folder_names(store: Path, logged: list[str]) -> None:
    for name in ("a;touch x", "$(touch x)", "my model", "a\nb"):
        (store / name / "1").mkdir(parents=True)
    for _ in range(2):
        assert list(scan_stores([store])) == ["m"]
    assert len(logged) == 4
    assert all("rename it" in line and "\n" not in line for line in logged)


def test_dangling_link_in_place_of_a_model(store: Path, tmp_path: Path) -> None:
    """Its disk may be back in a moment: it is not a model that has gone."""
    (store / "far").symlink_to(tmp_path / "disk" / "far")
    found = scan_stores([store])
    assert found["far"].unreadable
    assert "is a link that leads nowhere" in found["far"].problem
    (tmp_path / "disk" / "far" / "1").mkdir(parents=True)
    assert (scan_stores([store])["far"].problem, found["m"].problem) == ("", "")


def test_conversion_in_progress_is_ignored(store: Path) -> None:
    before = scan_stores([store])
    (store / "m" / ".graphkiln-1234" / "version").mkdir(parents=True)
    (store / "m" / ".graphkiln-1234" / "version" / "model.onnx").write_bytes(b"graph")
    assert scan_stores([store]) == before


@pytest.mark.parametrize("name", ["lost+found", "@eaDir", "__pycache__"])
def test_system_folders_are_ignored(store: Path, name: str) -> None:
    before = scan_stores([store])
    for place in (store, store / "m"):
        (place / name).mkdir()
        os.mkfifo(place / name / "pipe")
    assert scan_stores([store]) == before
    (store / "m" / "1" / name).mkdir()
    os.mkfifo(store / "m" / "1" / name / "pipe")
    assert (scan_stores([store])["m"].faults, scan_stores([store])["m"].problem) == ({}, "")


def test_unreadable_link(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "theirs").symlink_to("/root/theirs")
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert [path.name for path in model_folders(store)] == ["m", "theirs"]
    assert scan_stores([store])["m"].problem == ""
