"""Damaged Parquet: what can be read is, each other row is an error by its own name, and an outage is no damage."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scored_inputs import files_source, plan, read_all, read_unit

from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources import parquet
from graphkiln_backend.scoring.sources import places as local_storage

IMAGE, NUMBER, LABEL = range(3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three row groups of ten rows; two rows a page."""
    table = pa.table(
        {
            "image": pa.array([b"image %d" % number for number in range(30)], pa.binary()),
            "n": pa.array(range(30), pa.int64()),
            "label": [f"l{number}" for number in range(30)],
        }
    )
    pages = {"data_page_size": 1, "write_batch_size": 2, "write_page_checksum": True, "use_dictionary": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, compression="snappy", **pages)
    return tmp_path / "a.parquet"


def damage(path: Path, group: int, column: int, share: float) -> None:
    """Overwrites some bytes of a column in a row group: those that stand behind a share of it."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    offset = chunk.data_page_offset + int(chunk.total_compressed_size * share)
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = bytes(255 - byte for byte in content[offset : offset + 4])
    path.write_bytes(content)


@pytest.mark.parametrize("named", [{}, {"id": "n"}])
def test_a_damaged_row_group_costs_its_own_rows_alone(path: Path, named: dict[str, str]) -> None:
    damage(path, 1, IMAGE, 0.0)
    rows = read_all(files_source(path, kept=("label", "n"), **named), 100)
    there = [*range(10), *range(20, 30)]
    assert [row.id for row in rows] == [f"{'' if named else 'a.parquet:'}{number}" for number in range(30)]
    assert [row.content for row in rows] == [b"image %d" % n if n in there else None for n in range(30)]
    assert [row.kept["n"] for row in rows] == [number if number in there else None for number in range(30)]
    assert f"{path} is damaged in row group 1, from row 10 of the file on: " in rows[10].error


def test_rows_before_the_damaged_page_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a unit begins within the row group."""
    monkeypatch.setattr(parquet, "_ROWS_AT_A_TIME", 2)
    damage(path, 0, IMAGE, 0.95)
    for rows in (100, 3):
        read = read_all(files_source(path), rows)
        assert [row.content is None for row in read] == [number in {8, 9} for number in range(30)]
        assert "from row 8 of the file on" in read[8].error


def test_a_row_without_its_kept_column_is_an_error_rather_than_an_answer_beside_nothing(path: Path) -> None:
    damage(path, 2, LABEL, 0.5)
    rows = read_all(files_source(path, id="n", kept=("label",)), 100)
    damaged = [row for row in rows if row.error]
    assert damaged
    assert [row.id for row in damaged] == [str(number) for number in range(30 - len(damaged), 30)]
    assert {row.kept["label"] for row in damaged} == {None}
    assert all(row.kept["label"] == f"l{row.id}" for row in rows if not row.error)


def test_a_column_of_ids_that_is_damaged_ends_the_plan(path: Path) -> None:
    damage(path, 1, NUMBER, 0.0)
    with pytest.raises(ScoringError, match=r"a\.parquet is no sound Parquet file"):
        plan(files_source(path, id="n"))


def test_a_path_that_is_no_text_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"one")
    paths = pa.Array.from_buffers(pa.string(), 2, pa.array([b"1.jpg", b"\xe9.jpg"], pa.binary()).buffers())
    pq.write_table(pa.table({"file": paths, "n": [1, 2]}), tmp_path / "a.parquet")
    one, two = read_all(files_source(tmp_path / "a.parquet", image="file", id="n"))
    assert (one.content, two.content) == (b"one", None)
    assert "is no UTF-8" in two.error
    with pytest.raises(ScoringError, match="'file' names rows, and is no UTF-8"):
        plan(files_source(tmp_path / "a.parquet", image="file"))


class _FailingDisk(io.BytesIO):
    """Fails when it is told to."""

    fails = False

    def read(self, size: int | None = -1, /) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(size)


def test_a_disk_that_fails_is_told_apart_from_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = files_source(path)
    (unit,) = plan(source, 100)
    disk = _FailingDisk(path.read_bytes())

    monkeypatch.setattr(local_storage, "open_regular", lambda *_: disk)
    monkeypatch.setattr(local_storage, "_check", lambda *_: None)
    rows = source.rows(unit)
    next(rows)
    disk.fails = True
    with pytest.raises(SourceUnavailable, match=r"cannot read .*a\.parquet: Input/output error"):
        list(rows)
    monkeypatch.undo()
    assert [row.error for row in read_unit(source, unit)] == [""] * 30
