"""What a scan of model stores finds, and what it takes for another version."""

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


def test_models_and_versions_by_name_and_number(store: Path) -> None:
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
def test_other_files_are_another_version(store: Path, change: object) -> None:
    before = scan_stores([store])["m"]
    assert callable(change)
    change(store / "m" / "2")
    after = scan_stores([store])["m"]
    assert after.versions[1] == before.versions[1]
    assert after.versions[2] != before.versions[2]
    assert after.stamp == before.stamp


def test_configuration_and_labels_belong_to_the_model(store: Path) -> None:
    before = scan_stores([store])["m"]
    (store / "m" / "labels.txt").write_text("red\n")
    after = scan_stores([store])["m"]
    assert after.stamp != before.stamp
    assert after.versions == before.versions


def test_a_file_behind_a_link_counts(store: Path, tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(b"one")
    (store / "m" / "2" / "weights").symlink_to(tmp_path / "held")
    before = scan_stores([store])["m"]
    (tmp_path / "held").write_bytes(b"another")
    assert scan_stores([store])["m"].versions[2] != before.versions[2]


def test_a_link_that_leads_nowhere_or_back_is_no_end(store: Path) -> None:
    (store / "m" / "2" / "nowhere").symlink_to("/nowhere")
    assert scan_stores([store])["m"].problem == ""
    (store / "m" / "2" / "back").symlink_to(store)
    found = scan_stores([store])["m"]
    assert "cannot be read" in found.faults[2]
    assert (list(found.faults), found.problem) == ([2], "")


def test_a_link_to_itself_is_no_version_and_no_end(store: Path) -> None:
    before = scan_stores([store])["m"].versions
    (store / "m" / "7").symlink_to(store / "m" / "7")
    found = scan_stores([store])["m"]
    assert (found.versions, found.problem) == (before, "")


def test_a_fifo_is_named_and_not_opened(store: Path) -> None:
    os.mkfifo(store / "m" / "1" / "manifest.json")
    assert "manifest.json is neither a file nor a folder" in scan_stores([store])["m"].faults[1]
    os.mkfifo(store / "m" / "config.pbtxt.new")
    assert "config.pbtxt.new is neither a file nor a folder" in scan_stores([store])["m"].problem


def test_a_model_in_two_stores_is_a_problem_of_that_model_only(store: Path, tmp_path: Path) -> None:
    (tmp_path / "second" / "m" / "1").mkdir(parents=True)
    (tmp_path / "second" / "n" / "1").mkdir(parents=True)
    found = scan_stores([store, tmp_path / "second"])
    assert "two stores" in found["m"].problem
    assert found["n"].problem == ""


def test_a_model_without_versions_is_a_problem(store: Path) -> None:
    (store / "broken").mkdir()
    (store / "broken" / "config.pbtxt").touch()
    assert "has no version folder: make broken/1" in scan_stores([store])["broken"].problem
    (store / "broken" / "m" / "1").mkdir(parents=True)
    assert "is a model store, not a model" in scan_stores([store])["broken"].problem


def test_what_is_no_model_is_passed_over_and_said_once(store: Path, tmp_path: Path, logged: list[str]) -> None:
    for place in (store, tmp_path / "second"):
        (place / "empty").mkdir(parents=True)
    (store / "my notes").mkdir()
    (store / "my notes" / "README.md").touch()
    for _ in range(2):
        assert list(scan_stores([store, tmp_path / "second"])) == ["m"]
    assert [line.partition(" is passed over: ")[0] for line in logged] == [
        str(store / "empty"),
        str(store / "my notes"),
        str(tmp_path / "second" / "empty"),
    ]
    (store / "empty" / "1").mkdir()
    assert list(scan_stores([store])) == ["empty", "m"]


def test_a_store_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        scan_stores([tmp_path / "nowhere"])


def test_a_folder_whose_name_a_shell_would_execute_is_left_out_and_said_once(store: Path, logged: list[str]) -> None:
    for name in ("a;touch x", "$(touch x)", "my model", "a\nb"):
        (store / name / "1").mkdir(parents=True)
    for _ in range(2):
        assert list(scan_stores([store])) == ["m"]
    assert len(logged) == 4
    assert all("rename it" in line and "\n" not in line for line in logged)


def test_a_model_that_is_a_link_which_leads_nowhere_is_named(store: Path, tmp_path: Path) -> None:
    """Its disk may be back in a moment: it is not a model that has gone."""
    (store / "far").symlink_to(tmp_path / "disk" / "far")
    found = scan_stores([store])
    assert found["far"].unreadable
    assert "is a link that leads nowhere" in found["far"].problem
    (tmp_path / "disk" / "far" / "1").mkdir(parents=True)
    assert (scan_stores([store])["far"].problem, found["m"].problem) == ("", "")


def test_a_conversion_in_progress_is_no_change(store: Path) -> None:
    before = scan_stores([store])
    (store / "m" / ".graphkiln-1234" / "version").mkdir(parents=True)
    (store / "m" / ".graphkiln-1234" / "version" / "model.onnx").write_bytes(b"graph")
    assert scan_stores([store]) == before


@pytest.mark.parametrize("name", ["lost+found", "@eaDir", "__pycache__"])
def test_what_file_systems_put_there_is_no_model_and_no_part_of_one(store: Path, name: str) -> None:
    before = scan_stores([store])
    for place in (store, store / "m"):
        (place / name).mkdir()
        os.mkfifo(place / name / "pipe")
    assert scan_stores([store]) == before
    (store / "m" / "1" / name).mkdir()
    os.mkfifo(store / "m" / "1" / name / "pipe")
    assert (scan_stores([store])["m"].faults, scan_stores([store])["m"].problem) == ({}, "")


def test_a_link_to_where_one_may_not_look_takes_no_other_model_along(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "theirs").symlink_to("/root/theirs")
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert [path.name for path in model_folders(store)] == ["m", "theirs"]
    assert scan_stores([store])["m"].problem == ""
