"""What is read from the journal of a search that was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tune_kills import Searched, compare, count_damaged, count_repeated, count_unused, journal_lines, row_of

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


def test_what_the_last_run_did_not_ask_for_was_done_in_vain() -> None:
    assert count_unused([DONE, OTHER, b'{"begun": {}}'], 2) == 0
    assert count_unused([DONE, OTHER, DONE], 1) == 1


@pytest.mark.parametrize(
    ("logarithms", "words"),
    [
        ([0.5, -0.4, 0.3, -0.5, 0.2, -0.1], "equal within noise: p99 1.00 times"),
        ([0.05, 0.051, 0.049, 0.05, 0.05, 0.05], "equal within noise: p99 1.05 times the first one's, 1.05 to 1.05"),
        ([0.7, 0.65, 0.72, 0.69, 0.7, 0.7], "no: p99 2.00 times"),
        ([-0.7, -0.65, -0.72, -0.69, -0.7, -0.7], "no: p99 0.50 times"),
    ],
)
def test_choices_are_equal_where_rounds_do_not_tell_them_apart(logarithms: list[float], words: str) -> None:
    assert compare(logarithms).startswith(words)


def test_a_row_says_what_became_of_a_search() -> None:
    found = {"measurements": 1, "met": False, "promise": None, "chosen": None}
    row = row_of(Searched(found=found, lines=[b"{}", DONE, OTHER, b"["], moments=["1.0", "ended"]))
    assert (row["kills"], row["s after a line"], row["lines"], row["damaged"]) == (1, "1.0", 4, 1)
    assert (row["done twice"], row["in vain"], row["choice"], row["p99 ms"]) == (0, 1, "none", "-")
