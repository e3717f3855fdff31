"""What a running server served before a search: kept until it is put back, whatever becomes of the search."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.tuning.served_before import ServedBefore
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
