"""What a running server served before a search: kept until it is put back, whatever becomes of the search."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.tuning.served_before import ServedBefore, left_behind
from graphkiln_backend.graph.errors import MeasurementError

URL = "http://h:1"
FIRST, SECOND, OTHER = ({"max_batch_size": size} for size in (1, 2, 3))


def test_it_is_kept_until_it_is_put_back(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, URL, "m") as before:
        assert before.original is None
        before.note(OTHER, FIRST)
        before.note(OTHER, SECOND)
    with ServedBefore(tmp_path, URL, "m") as before:
        assert before.original == OTHER
        assert before.candidates == [FIRST, SECOND]
        before.settle()
        assert before.original is None
        assert before.candidates == []
        before.note(SECOND, FIRST)
        assert before.original == SECOND
        before.settle()
    assert list(tmp_path.iterdir()) == []


def test_models_and_servers_have_one_each(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, URL, "m") as before, ServedBefore(tmp_path, URL, "n") as other:
        before.note(OTHER, FIRST)
        assert other.original is None
        with ServedBefore(tmp_path, "http://h:2", "m") as elsewhere:
            assert elsewhere.original is None


def test_it_is_one_searchs_at_a_time(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, URL, "m"), pytest.raises(MeasurementError, match="another search's that runs now"):
        ServedBefore(tmp_path, URL, "m")


def test_this_machine_has_one_name(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, "http://localhost:8000", "m") as before:
        before.note(OTHER, FIRST)
    with ServedBefore(tmp_path, "http://user:secret@127.0.0.1:8000/", "m") as before:
        assert before.original == OTHER
        before.settle()
    with ServedBefore(tmp_path, "http://localhost:8002", "m") as before:
        assert before.original is None
        assert before.elsewhere() == []


def test_what_was_left_under_another_address_is_known(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, URL, "m") as killed, ServedBefore(tmp_path, URL, "n") as another:
        killed.note(OTHER, FIRST)
        killed.settle()
        killed.note(OTHER, SECOND)
        another.note(OTHER, FIRST)
    with ServedBefore(tmp_path, "grpc://h:2", "m") as before:
        (left,) = before.elsewhere()
        assert (left.server, left.original, left.candidates) == (URL, OTHER, [SECOND])
        with left.file.open("a") as file:
            file.write('{"candidate": {"max_')  # it is being written
        assert [each.candidates for each in before.elsewhere()] == [[SECOND]]
        left.file.write_text("no journal\n")
        assert before.elsewhere() == []


def test_what_was_left_behind_is_known_and_what_runs_is_not(tmp_path: Path) -> None:
    with ServedBefore(tmp_path, "http://127.0.0.1:1", "m") as before:
        before.note(OTHER, FIRST)
        assert left_behind(tmp_path) == []
    (left,) = left_behind(tmp_path)
    assert (left.server, left.model, left.candidates) == ("http://localhost:1", "m", [FIRST])
    assert left_behind(tmp_path / "none") == []
