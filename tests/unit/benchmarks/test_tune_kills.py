"""What is read from the journal of a search that was killed."""

from __future__ import annotations

import json
from pathlib import Path

from tune_kills import count_damaged, count_repeated, journal_lines

DONE = json.dumps({"done": {"probe": 1}}).encode()
OTHER = json.dumps({"done": {"probe": 2}}).encode()


def test_a_line_that_is_being_written_is_no_line(tmp_path: Path) -> None:
    assert journal_lines(tmp_path) == []
    folder = tmp_path / "graphkiln-tune"
    folder.mkdir()
    (folder / "digits-1.jsonl").write_bytes(b'{"target": 1}\n' + DONE + b'\n{"beg')
    assert journal_lines(tmp_path) == [b'{"target": 1}', DONE]


def test_lines_that_are_no_objects_are_damaged() -> None:
    assert count_damaged([DONE, b"{", b"[1]", b"\x00", OTHER]) == 3


def test_what_was_measured_again_is_counted() -> None:
    assert count_repeated([DONE, OTHER, b'{"begun": {}}']) == 0
    assert count_repeated([DONE, OTHER, DONE]) == 1
