"""Parquet files: ranges, columns, damage."""

from __future__ import annotations

import errno
import io
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_inputs import files_source, plan, read_all, read_unit

from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources import parquet
from graphkiln_backend.scoring.sources import parquet as parquet_rows
from graphkiln_backend.scoring.sources import storage as local_storage
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.parquet import ImageColumn, as_ids, find_image_column


def write(path: Path, rows: int, group: int = 1000, first: int = 0) -> Path:
    numbers = range(first, first + rows)
    table = pa.table(
        {
            "image": pa.array([str(number).encode() for number in numbers], pa.binary()),
            "n": pa.array(numbers, pa.int64()),
            "even": pa.array([number if number % 2 == 0 else None for number in numbers], pa.int16()),
        }
    )
    pq.write_table(table, path, row_group_size=group)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(count=st.integers(1, 120), group=st.integers(1, 130), rows=st.integers(1, 40))
def test_ranges_cover_each_row_once(tmp_path: Path, count: int, group: int, rows: int) -> None:
    read = read_all(files_source(write(tmp_path / "a.parquet", count, group)), rows)
    assert [row.content for row in read] == [str(number).encode() for number in range(count)]
    assert [row.id for row in read] == [f"a.parquet:{number}" for number in range(count)]


def test_small_row_groups_are_put_together_and_large_ones_split(tmp_path: Path) -> None:
    source = files_source(write(tmp_path / "small.parquet", 100, group=7))
    assert [unit.rows for unit in plan(source, 20)] == [21, 21, 21, 21, 16]
    source = files_source(write(tmp_path / "large.parquet", 100, group=100))
    assert [unit.rows for unit in plan(source, 20)] == [20] * 5


def test_a_large_row_group_of_images_is_split_into_few_pieces(tmp_path: Path) -> None:
    source = files_source(write(tmp_path / "a.parquet", 320, group=320))
    assert [unit.rows for unit in plan(source, 1)] == [20] * 16


def test_kept_columns_keep_the_type_of_nulls(tmp_path: Path) -> None:
    source = files_source(write(tmp_path / "a.parquet", 4), id="n", kept=("even", "n"))
    assert [(row.id, row.kept) for row in read_all(source)] == [
        ("0", {"even": 0, "n": 0}), ("1", {"even": None, "n": 1}),
        ("2", {"even": 2, "n": 2}), ("3", {"even": None, "n": 3}),
    ]  # fmt: skip
    (unit,) = plan(source, 10**9)
    assert {row.kept["even"].type for row in source.rows(unit)} == {pa.int16()}


def test_repeated_ids_are_named_across_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3)
    write(tmp_path / "b.parquet", 3, first=2)
    with pytest.raises(ScoringError, match="1 id occurs more than once: '2'"):
        plan(files_source(tmp_path, id="n"))


def test_images_may_be_named_by_paths(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"one")
    pq.write_table(pa.table({"file": ["1.jpg", "2.jpg", None]}), tmp_path / "a.parquet")
    with pytest.raises(ScoringError, match="has nulls"):
        plan(files_source(tmp_path / "a.parquet", image="file"))
    pq.write_table(pa.table({"file": ["1.jpg", "2.jpg"]}), tmp_path / "a.parquet")
    rows = read_all(files_source(tmp_path / "a.parquet", image="file"))
    assert [(row.id, row.content) for row in rows] == [("1.jpg", b"one"), ("2.jpg", None)]


def test_structs_of_bytes_and_path(tmp_path: Path) -> None:
    (tmp_path / "2.jpg").write_bytes(b"two")
    images = [{"bytes": b"one", "path": "1.jpg"}, {"bytes": None, "path": "2.jpg"}, {"bytes": None, "path": None}, None]
    pq.write_table(pa.table({"image": images}), tmp_path / "train.parquet")
    rows = read_all(files_source(tmp_path / "train.parquet"))
    assert [(row.content, row.error) for row in rows] == [
        (b"one", ""), (b"two", ""), (None, "the row has no image"), (None, "the row has no image"),
    ]  # fmt: skip


def test_a_file_that_was_replaced_ends_the_run(tmp_path: Path) -> None:
    source = files_source(write(tmp_path / "a.parquet", 4))
    (unit,) = plan(source, 10**9)
    write(tmp_path / "a.parquet", 5)
    with pytest.raises(InputChanged, match="has changed"):
        read_unit(source, unit)
    assert plan(source, 10**9)[0].id != unit.id


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    source = files_source(write(tmp_path / "a.parquet", 4))
    (unit,) = plan(source, 10**9)
    rows = source.rows(unit)
    next(rows)
    write(tmp_path / "new.parquet", 4, first=1).rename(tmp_path / "a.parquet")
    with pytest.raises(InputChanged, match="while it was read"):
        list(rows)


def test_invalid_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ScoringError, match="not a valid Parquet file"):
        plan(files_source(tmp_path / "a.parquet"))
    with pytest.raises(ScoringError, match="has no rows"):
        plan(files_source(write(tmp_path / "a.parquet", 0)))


def test_memory_holds_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's and Python's own memory, while a row group of 64 MB is read."""
    image = bytes(range(256)) * 2048
    table = pa.table({"image": pa.array([image] * 128, pa.binary())})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False, write_batch_size=4)
    del table
    source = files_source(tmp_path / "a.parquet")
    (unit,) = plan(source, 10**9)
    monkeypatch.setattr(parquet_rows, "_ROWS_AT_A_TIME", 4)
    before, most = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for row in source.rows(unit):
            assert len(row.load()) == len(image)
            most = max(most, pa.total_allocated_bytes() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most + peak < 16 * 2**20


def test_names_of_columns_may_hold_anything(tmp_path: Path) -> None:
    """Parquet itself puts dots between the parts of a nested column's name."""
    nested = pa.array([{"c": 7}, {"c": 8}])
    names = {"image.Bytes": [b"1", b"2"], "a.b": ["x", "y"], "a": nested, "Ä b": [1, 2], "IMAGE": [3, 4]}
    pq.write_table(pa.table(names), tmp_path / "a.parquet")
    rows = read_all(files_source(tmp_path, image="image.Bytes", id="a.b", kept=("a", "Ä b", "IMAGE", "a.b")))
    assert [(row.id, row.content) for row in rows] == [("x", b"1"), ("y", b"2")]
    assert rows[1].kept == {"a": {"c": 8}, "Ä b": 2, "IMAGE": 4, "a.b": "y"}


def test_dictionary_columns_are_decoded(tmp_path: Path) -> None:
    """Their numbers are as wide as a file needs them: two files of one data set would have two types."""
    for name, width in (("a", pa.int8()), ("b", pa.int32())):
        shops = pa.array(["x", None, "y"], pa.dictionary(width, pa.string()))
        pq.write_table(pa.table({"image": [b"1", b"2", b"3"], "shop": shops}), tmp_path / f"{name}.parquet")
    source = files_source(tmp_path, kept=("shop",))
    assert [row.kept["shop"] for row in read_all(source)] == ["x", None, "y"] * 2
    assert {row.kept["shop"].type for unit in plan(source) for row in source.rows(unit)} == {pa.string()}


@pytest.mark.parametrize("price", [[1.5], [None], ["1"]])
def test_kept_column_of_two_types_is_refused(tmp_path: Path, price: list[object]) -> None:
    pq.write_table(pa.table({"image": [b"1"], "price": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"image": [b"2"], "price": price}), tmp_path / "b.parquet")
    with pytest.raises(ScoringError, match=r"'price' is \w+ in b\.parquet, but int64 in a\.parquet"):
        plan(files_source(tmp_path, kept=("price",)))
    assert len(plan(files_source(tmp_path))) == 2


def test_unsupported_addresses_are_refused_by_the_plan(tmp_path: Path) -> None:
    pq.write_table(pa.table({"url": ["a.jpg", "https://host/b.jpg"], "n": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ScoringError, match=r"'https://host/b\.jpg' cannot be read"):
        plan(files_source(tmp_path, image="url"))
    rows = read_all(files_source(tmp_path, image="url", id="n"))
    assert rows[1].error == "'https://host/b.jpg' cannot be read (supported are paths, s3://, gs:// and file://)"


def test_row_groups_and_files_without_rows_are_passed_over(tmp_path: Path) -> None:
    schema = pa.schema([("image", pa.binary())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for content in ([], [b"1"], [], [], [b"2", None, b""], []):
            writer.write_table(pa.table({"image": pa.array(content, pa.binary())}), row_group_size=10)
    pq.write_table(schema.empty_table(), tmp_path / "b.parquet")
    for rows in (1, 2, 100):
        read = read_all(files_source(tmp_path), rows)
        assert [(row.id, row.content) for row in read] == [
            ("a.parquet:0", b"1"), ("a.parquet:1", b"2"), ("a.parquet:2", None), ("a.parquet:3", b""),
        ]  # fmt: skip


def test_struct_fields_are_named_with_dots(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"file")
    inner = [{"id": "x", "price": 3}, {"id": "y", "price": None}]
    data = [{"jpeg": b"1", "file": "1.jpg", "meta": meta} for meta in inner]
    pq.write_table(pa.table({"n": [1, 2], "data": data}), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    one, two = read_all(files_source(path, image="data.jpeg", id="data.meta.id", kept=("data.meta.price", "n")))
    assert (one.id, one.content, one.kept) == ("x", b"1", {"data.meta.price": 3, "n": 1})
    assert (two.id, two.kept) == ("y", {"data.meta.price": None, "n": 2})
    one, two = read_all(files_source(path, image="data.file", id="n", kept=("data.meta",)))
    assert (one.content, two.kept) == (b"file", {"data.meta": {"id": "y", "price": None}})
    with pytest.raises(
        ScoringError, match=r"no column 'data\.png' \(it has n, data, data\.jpeg, data\.file, data\.meta"
    ):
        plan(files_source(path, image="data.png"))


# Damage: unreadable rows become errors, and an outage is not damage.

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
    assert f"{path} is damaged in row group 1, starting at row 10 of the file: " in rows[10].error


def test_rows_before_the_damaged_page_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a unit begins within the row group."""
    monkeypatch.setattr(parquet, "_ROWS_AT_A_TIME", 2)
    damage(path, 0, IMAGE, 0.95)
    for rows in (100, 3):
        read = read_all(files_source(path), rows)
        assert [row.content is None for row in read] == [number in {8, 9} for number in range(30)]
        assert "starting at row 8 of the file" in read[8].error


def test_row_with_a_damaged_kept_column_is_an_error(path: Path) -> None:
    damage(path, 2, LABEL, 0.5)
    rows = read_all(files_source(path, id="n", kept=("label",)), 100)
    damaged = [row for row in rows if row.error]
    assert damaged
    assert [row.id for row in damaged] == [str(number) for number in range(30 - len(damaged), 30)]
    assert {row.kept["label"] for row in damaged} == {None}
    assert all(row.kept["label"] == f"l{row.id}" for row in rows if not row.error)


def test_a_column_of_ids_that_is_damaged_ends_the_plan(path: Path) -> None:
    damage(path, 1, NUMBER, 0.0)
    with pytest.raises(ScoringError, match=r"a\.parquet is not a valid Parquet file"):
        plan(files_source(path, id="n"))


def test_a_path_that_is_no_text_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"one")
    paths = pa.Array.from_buffers(pa.string(), 2, pa.array([b"1.jpg", b"\xe9.jpg"], pa.binary()).buffers())
    pq.write_table(pa.table({"file": paths, "n": [1, 2]}), tmp_path / "a.parquet")
    one, two = read_all(files_source(tmp_path / "a.parquet", image="file", id="n"))
    assert (one.content, two.content) == (b"one", None)
    assert "not UTF-8" in two.error
    with pytest.raises(ScoringError, match="not UTF-8"):
        plan(files_source(tmp_path / "a.parquet", image="file"))


class _FailingDisk(io.BytesIO):
    """Reads fail once `fails` is set."""

    fails = False

    def read(self, size: int | None = -1, /) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(size)


def test_failing_disk_is_an_outage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Which column is the image, and which can name rows.

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def find(columns: dict[str, pa.DataType], image: str = "") -> ImageColumn:
    return find_image_column(pa.schema(list(columns.items())), Columns(image=image), "file")


def test_ambiguous_image_column_is_refused() -> None:
    for columns, message in (({"path": pa.string()}, "no column"), ({"a": pa.binary(), "b": STRUCT}, "2 columns")):
        with pytest.raises(ScoringError, match=f"{message} of image bytes.*--image-column"):
            find(columns)
    with pytest.raises(ScoringError, match="cannot hold images"):
        find({"n": pa.int64()}, "n")
    with pytest.raises(ScoringError, match=r"no column 'x' \(it has n\)"):
        find({"n": pa.int64()}, "x")


def test_invalid_id_columns_are_refused() -> None:
    with pytest.raises(ScoringError, match="cannot be the id column"):
        as_ids(pa.array([1.0]), "n", "file")
    with pytest.raises(ScoringError, match="has nulls"):
        as_ids(pa.array(["a", None]), "n", "file")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_text_of_every_kind_names_images_and_rows(kind: pa.DataType) -> None:
    column = find({"path": kind}, "path")
    assert column.is_path
    paths = pa.array(["a", "b", "a"], kind)
    assert [column.value(paths, index) for index in range(3)] == [(None, "a"), (None, "b"), (None, "a")]
    assert as_ids(paths, "path", "file") == ["a", "b", "a"]


def test_duplicate_column_names_are_refused() -> None:
    schema = pa.schema([("image", pa.binary()), ("image", pa.int64()), ("n", pa.int64()), ("n", pa.int64())])
    for columns in (Columns(), Columns(image="image"), Columns(image="image", kept=("n",))):
        with pytest.raises(ScoringError, match="two columns named 'image'"):
            find_image_column(schema, columns, "file")
    other = pa.schema([("image", pa.binary()), ("n", pa.int64()), ("n", pa.int64())])
    assert find_image_column(other, Columns(), "file").name == "image"
    with pytest.raises(ScoringError, match="two columns named 'n'"):
        find_image_column(other, Columns(kept=("n",)), "file")
