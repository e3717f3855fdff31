"""The journal survives a kill at any byte, and belongs to one search and one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln.tuning.journal import Journal
from graphkiln_backend.graph.errors import MeasurementError

SUBJECT = {"model": "abc", "machine": {"cores": 2}}
EVENTS = [{"begun": number, "text": "ä" * number} for number in range(4)]


def write(path: Path) -> None:
    with Journal(path, SUBJECT) as journal:
        for event in EVENTS:
            journal.append(event)


def test_events_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "journal"
    write(path)
    with Journal(path, SUBJECT) as journal:
        assert journal.events == EVENTS
        journal.append({"more": 1})
    with Journal(path, SUBJECT) as journal:
        assert journal.events == [*EVENTS, {"more": 1}]


def test_a_line_that_is_torn_at_any_byte_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    content = path.read_bytes()
    for size in (*range(0, len(content), 5), len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        whole = max(0, content[:size].count(b"\n") - 1)
        with Journal(path, SUBJECT) as journal:
            assert journal.events == EVENTS[:whole]
            journal.append({"after": size})
        with Journal(path, SUBJECT) as journal:
            assert journal.events == [*EVENTS[:whole], {"after": size}]


@pytest.mark.parametrize(
    ("subject", "what"),
    [
        ({**SUBJECT, "model": "other"}, 'model is "other", the journal\'s "abc"'),
        ({**SUBJECT, "machine": {"cores": 4}}, r"machine is .*4.*2"),
        ({**SUBJECT, "target": "50 ms"}, 'target is "50 ms", the journal\'s null'),
    ],
)
def test_the_journal_of_another_search_is_refused_and_kept(
    tmp_path: Path, subject: dict[str, object], what: str
) -> None:
    path = tmp_path / "journal"
    write(path)
    before = path.read_bytes()
    with pytest.raises(MeasurementError, match=f"belongs to another search: {what}"):
        Journal(path, subject)
    assert path.read_bytes() == before


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(MeasurementError, match="version is 1, the journal's 2"):
        Journal(path, SUBJECT)


@pytest.mark.parametrize("line", [b"{torn}\n", b"[1]\n", b"\n", b"\xff\n"])
def test_damage_in_the_middle_is_told_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    write(path)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + line + rest)
    with pytest.raises(MeasurementError, match="damaged at line 2"):
        Journal(path, SUBJECT)


def test_two_searches_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SUBJECT), pytest.raises(MeasurementError, match="another search's that runs now"):
        Journal(path, SUBJECT)
    write(path)  # the lock went with the first one, and with the one that was refused


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"cannot be opened: Is a directory.*delete it"):
        Journal(tmp_path, SUBJECT)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with Journal(tmp_path / "journal", SUBJECT) as journal:
        monkeypatch.setattr("os.write", full)
        with pytest.raises(MeasurementError, match="cannot be written: No space left"):
            journal.append({})
        assert journal.events == []


def test_a_line_that_was_half_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is room again, the next line must not follow half of another one."""
    path, write_some = tmp_path / "journal", os.write
    rooms = [5, -1]

    def fill(descriptor: int, line: memoryview) -> int:
        room = rooms.pop(0)
        if room < 0:
            raise OSError(28, "No space left on device")
        return write_some(descriptor, line[:room])

    with Journal(path, SUBJECT) as journal:
        with monkeypatch.context() as patched:
            patched.setattr("os.write", fill)
            with pytest.raises(MeasurementError, match=r"No space left.*make room; then the same command goes on"):
                journal.append({"lost": 1})
        journal.append({"kept": 1})
    with Journal(path, SUBJECT) as journal:
        assert journal.events == [{"kept": 1}]


def test_a_folder_that_cannot_be_made_is_told_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError, match=r"cannot be opened: .*XDG_CACHE_HOME"):
        Journal(tmp_path / "file" / "journal", SUBJECT)
