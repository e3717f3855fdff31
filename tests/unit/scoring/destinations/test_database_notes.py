"""Notes and claims in a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.database_notes import DatabaseNotes
from graphkiln_backend.scoring.destinations.lease import claim
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
    held = claim(notes, "first")
    with pytest.raises(DestinationBusy, match=r"127.0.0.1:\d+/postgres, here is being written by run first"):
        claim(notes, "second")
    held.release()
    claim(notes, "second")
