"""What came before a process ended is found by the next one: whole files alone, as they were listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.repository.remote_copy import KeptFiles, note
from graphkiln_backend.repository.remote_files import RemoteFile

WHOLE, HALF = RemoteFile("etag", 5), RemoteFile("other", 9)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a dead process left: a file that it noted, one that came in part, one that is gone, and a line cut off."""
    folder = tmp_path / "staging" / "left"
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.onnx").write_bytes(b"whole")
    (folder / "m" / "1" / "weights").write_bytes(b"hal")
    note("m/1/model.onnx", WHOLE, folder)
    note("m/1/gone", WHOLE, folder)
    with (folder / ".whole").open("a") as notes:
        notes.write('["m/1/wei')
    return folder


def test_only_what_is_whole_is_found_and_the_rest_goes(left: Path) -> None:
    (left.parent / "without notes").mkdir()
    found = KeptFiles.find(left.parent)
    assert found.places == {("m/1/model.onnx", WHOLE): left / "m/1/model.onnx"}
    assert sorted(path.name for path in left.parent.rglob("*") if path.is_file()) == [".whole", "model.onnx"]
    assert list(left.parent.iterdir()) == [left]


def test_a_file_of_another_length_did_not_come(left: Path) -> None:
    note("m/1/weights", HALF, left)
    assert ("m/1/weights", HALF) not in KeptFiles.find(left.parent).places


def test_what_is_linked_outlives_its_folder_and_is_noted_again(left: Path, tmp_path: Path) -> None:
    found, new = KeptFiles.find(left.parent), tmp_path / "new" / "folder"
    new.mkdir(parents=True)
    assert not found.link("m/1/model.onnx", RemoteFile("changed since", 5), new)
    assert found.link("m/1/model.onnx", WHOLE, new)
    found.forget()
    assert not left.exists()
    assert (new / "m/1/model.onnx").read_bytes() == b"whole"
    assert KeptFiles.find(new.parent).places.keys() == {("m/1/model.onnx", WHOLE)}


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    found = KeptFiles.find(tmp_path)
    assert not found.link("m", WHOLE, tmp_path)
    found.forget()
