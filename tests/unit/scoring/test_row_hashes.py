"""Ids that occur twice are found however far they are apart; memory and files are bounded and vanish."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring import row_hashes
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.row_hashes import RowHashes, hash_ids


def chunked(values: list[object]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values)])


def test_repeated_ids_are_found_across_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_hashes, "_BUFFERED", 100)
    with RowHashes(tmp_path) as hashes:
        for begin in range(0, 5000, 50):
            hashes.add(chunked([f"row {index}" for index in range(begin, begin + 50)]))
        hashes.add(chunked(["row 7", "row 4999", "row 4999"]))
        found = hashes.repeated()
        assert len(list(tmp_path.iterdir())) == 1
    assert list(found) == sorted(hash_ids(chunked(["row 7", "row 4999"])))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [["a", "ä", ""], [1, 2, -3], [b"x", b"y"], [1.5, 2.5]])
def test_ids_of_any_type(values: list[object]) -> None:
    assert len(set(hash_ids(chunked(values)))) == len(values)


@settings(max_examples=20)
@given(st.lists(st.text(max_size=2), max_size=40))
def test_only_repeated_ids_are_refused(ids: list[str]) -> None:
    with RowHashes() as hashes:
        hashes.add(ids[:7])
        hashes.add(ids[7:])
        if len(set(ids)) == len(ids):
            hashes.refuse_repeated(lambda: ids, "")
        else:
            with pytest.raises(ScoringError, match="more than once"):
                hashes.refuse_repeated(lambda: ids, "")


def test_repeated_id_is_named_with_the_hint() -> None:
    ids = [b"a.jpg", b"b.jpg", b"a.jpg", b"c.jpg", b"a.jpg"]
    with RowHashes() as hashes:
        hashes.add(ids)
        with pytest.raises(ScoringError, match=r"1 id occurs more than once: 'a.jpg' \(mend it\)"):
            hashes.refuse_repeated(lambda: ids, "mend it")


def test_hash_collision_is_not_a_repetition() -> None:
    with RowHashes() as hashes:
        hashes.add(["a", "a"])  # simulates two ids with the same hash
        hashes.refuse_repeated(lambda: ["a", "b"], "")
