"""Notes and claims in a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.scoring.destinations import database as database_notes
from graphkiln_backend.scoring.destinations.database import Database, DatabaseNotes
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.errors import DestinationBusy

pytestmark = pytest.mark.slow


@pytest.fixture
def notes(database: Database) -> DatabaseNotes:
    made = DatabaseNotes(database, "here")
    made.prepare()
    made.prepare()
    return made


def test_contents(notes: DatabaseNotes, database: Database, tmp_path: Path) -> None:
    assert notes.create("a", memoryview(b"content"))
    assert not notes.create("a", memoryview(b"other"))
    (tmp_path / "file").write_bytes(b"2")
    notes.replace("a", tmp_path / "file")
    notes.replace("b", memoryview(b"3"))
    assert sorted(notes.names()) == ["a", "b"]
    assert notes.read("a") == notes.open("a").read() == b"2"
    assert notes.fetch("a", tmp_path / "copy")
    assert not notes.fetch("c", tmp_path / "copy")
    with pytest.raises(FileNotFoundError):
        notes.open("c")
    assert notes.age_s("c") is None
    assert 0 <= (notes.age_s("a") or 0) < 60
    assert list(DatabaseNotes(database, "there").names()) == []
    notes.delete("a")
    notes.delete("a")
    assert notes.read("a") is None


def test_claims(notes: DatabaseNotes) -> None:
    held = Lock(notes, "first")
    with pytest.raises(DestinationBusy, match=r"127.0.0.1:\d+/postgres, here is being written by run first"):
        Lock(notes, "second")
    held.close()
    Lock(notes, "second")


def test_a_note_larger_than_a_value_of_the_database(
    notes: DatabaseNotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a hundred million images in a folder names each of them."""
    monkeypatch.setattr(database_notes, "_PIECE", 4)
    long, path = b"0123456789" * 5, tmp_path / "plan"
    path.write_bytes(long)
    notes.replace("_plan", path)
    notes.replace("_plan_", memoryview(b"another"))
    assert sorted(notes.names()) == ["_plan", "_plan_"]
    assert notes.read("_plan") == notes.open("_plan").read() == long
    assert notes.fetch("_plan", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == long
    for shorter in (b"01234", b"", b"012345678"):
        notes.replace("_plan", memoryview(shorter))
        assert notes.read("_plan") == shorter
    notes.delete("_plan")
    assert (list(notes.names()), notes.read("_plan_")) == (["_plan_"], b"another")
    assert not notes.fetch("_plan", tmp_path / "none")
    assert not (tmp_path / "none").exists()
