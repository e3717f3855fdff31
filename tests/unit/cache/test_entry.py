"""Entries of the artifact cache: how they are named, what `entry.json` says, and what is not believed of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from graphkiln_backend.cache.store import Entry, FileRecord, entry_name, find_fault, read_entry

KEY = {"graph": "abc", "device": "cpu"}


def write_entry(folder: Path, entry: Entry, **files: bytes) -> Path:
    """An entry with files, under its own name."""
    path = folder / entry.name
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    records = {name: FileRecord.of(path / name) for name in files}
    Entry(kind=entry.kind, model=entry.model, key=entry.key, files=records, seconds=1.5).write(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_entry(tmp_path, Entry(kind="engine", model="m/1", key=KEY), blob=b"compiled")


class TestName:
    def test_is_the_kind_and_a_digest_that_anybody_can_compute(self) -> None:
        digest = hashlib.sha256(b'{"device": "cpu", "graph": "abc", "kind": "engine"}').hexdigest()
        assert entry_name("engine", KEY) == f"engine-{digest[:40]}"
        assert Entry(kind="engine", model="m/1", key=KEY).name == entry_name("engine", KEY)


class TestReading:
    def test_what_was_written_comes_back(self, path: Path) -> None:
        entry = read_entry(path)
        assert entry is not None
        assert (entry.kind, entry.model, entry.key, entry.seconds) == ("engine", "m/1", KEY, 1.5)
        assert entry.files == {"blob": FileRecord(bytes=8, sha256=hashlib.sha256(b"compiled").hexdigest())}

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "null",
            "[]",
            '"engine"',
            "{}",
            '{"kind": "engine", "model": "m"}',
            '{"kind": "engine", "model": "m", "key": {"a": 1}, "files": {}, "seconds": 0.0}',
            '{"kind": "engine", "model": "m", "key": {}, "files": {"f": {}}, "seconds": 0.0}',
            '{"kind": "engine", "model": "m", "key": {}, "files": {}, "seconds": 0.0, "more": 1}',
            "\xff",
        ],
    )
    def test_what_is_no_entry_is_none(self, path: Path, text: str) -> None:
        (path / "entry.json").write_text(text, encoding="latin-1")
        assert read_entry(path) is None
        assert find_fault(path) == "entry.json cannot be read"


class TestFaults:
    def test_a_whole_entry_has_none(self, path: Path) -> None:
        assert find_fault(path) is None
        assert find_fault(path, KEY) is None

    def test_another_key_than_the_one_that_is_looked_for(self, path: Path) -> None:
        assert find_fault(path, {**KEY, "graph": "def"}) == "its key does not match"
        assert find_fault(path, {}) == "its key does not match"

    @pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "below/blob", "..", ""])
    def test_a_file_elsewhere_is_not_even_opened(self, path: Path, name: str) -> None:
        document = json.loads((path / "entry.json").read_text())
        document["files"] = {name: {"bytes": 1, "sha256": "0"}}
        (path / "entry.json").write_text(json.dumps(document))
        fault = find_fault(path)
        assert fault is not None
        assert "outside of the entry" in fault or "Is a directory" in fault
