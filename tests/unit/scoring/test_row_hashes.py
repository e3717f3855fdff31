"""Ids that occur twice are found however far they are apart; memory and files are bounded and vanish."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from graphkiln_backend.scoring import row_hashes
from graphkiln_backend.scoring.row_hashes import RowHashes, hash_ids


def chunked(values: list[object]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values)])


def test_the_repeated_ones_are_found_across_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_hashes, "_HELD", 100)
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
