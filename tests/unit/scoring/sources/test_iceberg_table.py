"""Iceberg tables as sources."""

from __future__ import annotations

import datetime
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_tables import add_delete_file, configure, delete_positions, open_catalog
from pyiceberg.catalog import Catalog
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.types import LongType
from pyroaring import BitMap
from scored_inputs import Answerable, plan, read_all, read_unit
from scoring_runs import destination_at

from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable
from graphkiln_backend.scoring.iceberg import TableName
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.plan import note_snapshot, open_source, pin_snapshot
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.iceberg import IcebergSource

PHOTOS = "iceberg:lake/shop.photos"
SCHEMA = pa.schema([("image", pa.binary()), ("n", pa.int32()), ("shop", pa.string()), ("day", pa.date32())])
DAY = datetime.date(2026, 2, 28)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    return open_catalog(tmp_path / "lake", monkeypatch)


def rows(*numbers: int) -> pa.Table:
    columns = [[b"%d" % number for number in numbers], list(numbers)]
    return pa.table([*columns, [f"Käse {number % 2}" for number in numbers], [DAY] * len(numbers)], schema=SCHEMA)


@pytest.fixture
def table(catalog: Catalog) -> Table:
    made = catalog.create_table("shop.photos", SCHEMA)
    made.append(rows(1, 2))
    made.append(rows(3))
    return made


def source(text: str = PHOTOS, **columns: Any) -> IcebergSource:
    return IcebergSource(TableName.parse(text), Columns(**{"id": "n", **columns}))


def images(text: str = PHOTOS, **columns: Any) -> list[bytes]:
    return sorted(row.content or b"" for row in read_all(source(text, **columns), 100))


def data_paths(table: Table) -> list[str]:
    return sorted(task.file.file_path for task in table.refresh().scan().plan_files())


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def test_newest_or_named_snapshot_is_read(table: Table) -> None:
    first, second = (snapshot.snapshot_id for snapshot in table.snapshots())
    table.overwrite(rows(4, 5))
    assert images() == [b"4", b"5"]
    assert images(f"{PHOTOS}@{second}") == [b"1", b"2", b"3"]
    assert images(f"{PHOTOS}@{first}") == [b"1", b"2"]
    table.manage_snapshots().create_tag(first, "trained").create_branch(second, "old").commit()
    assert images(f"{PHOTOS}@trained") == [b"1", b"2"]
    assert images(f"{PHOTOS}@old") == [b"1", b"2", b"3"]


@pytest.mark.wide
def test_appended_rows_are_new_units(table: Table) -> None:
    before = {unit.id for unit in plan(source())}
    table.append(rows(4))
    after = {unit.id for unit in plan(source())}
    assert before < after
    assert len(after - before) == 1


@pytest.mark.wide
@pytest.mark.usefixtures("table")
def test_ids_without_a_column_are_files_and_positions() -> None:
    found = read_all(source(id="", kept=("n",)))
    assert len({row.id for row in found}) == 3
    assert all(row.id.startswith("data/") and ".parquet:" in row.id for row in found)


def test_deleted_positions_are_not_read_and_change_their_unit_only(table: Table) -> None:
    before = plan(source(id=""))
    paths = data_paths(table)
    (of_two,) = (path for path in paths if pq.read_metadata(local(path)).num_rows == 2)
    delete_positions(table, of_two, [0])
    assert images() == [b"2", b"3"]
    after = plan(source(id=""))
    assert [unit.rows for unit in after] == [1, 1]
    assert len({unit.id for unit in before} & {unit.id for unit in after}) == 1
    (row,) = (row for row in read_all(source(id="")) if row.content == b"2")
    assert row.id.endswith(":1"), "the position in the file stays"
    delete_positions(table, of_two, [1])
    assert images() == [b"3"]
    assert [unit.rows for unit in plan(source())] == [1], "a file without rows has no unit"
    assert images(f"{PHOTOS}@{table.snapshots()[1].snapshot_id}") == [b"1", b"2", b"3"]


@pytest.mark.wide
def test_deletes_in_large_row_groups(catalog: Catalog) -> None:
    table = catalog.create_table("shop.photos", SCHEMA, properties={"write.parquet.row-group-limit": "40"})
    table.append(rows(*range(100)))
    (path,) = data_paths(table)
    gone = {0, 7, 39, 40, 41, 63, 99}
    delete_positions(table, path, sorted(gone))
    units = plan(source(), 10)
    assert len(units) > 3
    assert sum(unit.rows for unit in units) == 93
    found = [row.content for unit in units for row in read_unit(source(), unit)]
    assert found == [b"%d" % number for number in range(100) if number not in gone]


@pytest.mark.wide
def test_row_that_was_updated_has_its_id_once(table: Table) -> None:
    (of_two,) = (path for path in data_paths(table) if pq.read_metadata(local(path)).num_rows == 2)
    table.append(rows(1))
    with pytest.raises(ScoringError, match="1 id occurs more than once: '1'"):
        plan(source())
    delete_positions(table, of_two, [0])
    assert images() == [b"1", b"2", b"3"]


@pytest.mark.wide
def test_deletion_vectors_are_read(catalog: Catalog) -> None:
    """Of version 3: pyiceberg writes none, so this one is written by hand."""
    table = catalog.create_table("shop.photos", SCHEMA, properties={"format-version": "2"})
    table.append(rows(1, 2, 3))
    (path,) = data_paths(table)
    place = f"{table.location()}/data/marks.puffin"
    puffin(local(place), path, [0, 2])
    add_delete_file(table, place, DataFileContent.POSITION_DELETES, 2, FileFormat.PUFFIN)
    assert images() == [b"2"]


def puffin(place: Path, path: str, positions: list[int]) -> None:
    """Source: the Puffin specification, "deletion-vector-v1", and RoaringFormatSpec with one bitmap of 32 bits."""
    vector = (1).to_bytes(8, "little") + (0).to_bytes(4, "little") + BitMap(positions).serialize()
    marked = bytes.fromhex("D1D33964") + vector
    blob = len(marked).to_bytes(4, "big") + marked + zlib.crc32(marked).to_bytes(4, "big")
    facts = {"type": "deletion-vector-v1", "fields": [], "snapshot-id": -1, "sequence-number": -1, "offset": 4}
    facts |= {"length": len(blob), "properties": {"referenced-data-file": path, "cardinality": str(len(positions))}}
    footer = json.dumps({"blobs": [facts], "properties": {}}).encode()
    magic = b"PFA1"
    end = len(footer).to_bytes(4, "little") + bytes(4) + magic
    place.write_bytes(magic + blob + magic + footer + end)


def test_equality_deletes_are_refused(table: Table) -> None:
    place = f"{table.location()}/data/equal.parquet"
    column = pa.schema([pa.field("n", pa.int32(), metadata={"PARQUET:field_id": "2"})])
    pq.write_table(pa.table([[2]], schema=column), local(place))
    add_delete_file(table, place, DataFileContent.EQUALITY_DELETES, 1, equality_ids=[2])
    with pytest.raises(ScoringError, match=r"equality deletes, which pyiceberg cannot read \(rewrite its files"):
        plan(source())
    older = table.refresh().snapshots()[1].snapshot_id
    assert images(f"{PHOTOS}@{older}") == [b"1", b"2", b"3"]


@pytest.mark.wide
def test_partition_columns_are_kept(catalog: Catalog) -> None:
    table = catalog.create_table("shop.photos", SCHEMA)
    with table.update_spec() as update:
        update.add_identity("shop")
    table.append(rows(1, 2, 3))
    assert len(data_paths(table)) == 2
    kept = {row.id: row.kept for row in read_all(source(kept=("shop", "day")))}
    assert kept == {str(number): {"shop": f"Käse {number % 2}", "day": DAY} for number in (1, 2, 3)}


def test_partition_columns_that_files_lack_are_kept(catalog: Catalog) -> None:
    """As in tables that were migrated from Hive: the values are in the metadata only."""
    table = catalog.create_table("shop.photos", SCHEMA)
    with table.update_spec() as update:
        update.add_identity("shop").add_identity("day")
    table.append(rows(2))
    (path,) = data_paths(table)
    size = local(path).stat().st_size
    content = pq.ParquetFile(local(path)).read().drop_columns(["shop", "day"])
    for count in range(size):  # the metadata has the size of the file
        pq.write_table(content.replace_schema_metadata({"pad": "x" * count}), local(path))
        if local(path).stat().st_size == size:
            break
    (row,) = read_all(source(kept=("shop", "day")))
    assert row.kept == {"shop": "Käse 0", "day": DAY}


def test_columns_are_found_by_their_ids(table: Table) -> None:
    """Renamed, widened and added columns, in files from before."""
    with table.update_schema() as update:
        update.rename_column("shop", "store")
        update.update_column("n", field_type=LongType())
        update.add_column("price", LongType())
    newer = rows(4).rename_columns(["image", "n", "store", "day"])
    newer = newer.set_column(1, "n", pa.array([4], pa.int64())).append_column("price", pa.array([7], pa.int64()))
    table.append(newer)
    found = {row.id: row.kept for row in read_all(source(kept=("store", "price", "n")), 100)}
    assert found["1"] == {"store": "Käse 1", "price": None, "n": 1}
    assert found["4"] == {"store": "Käse 0", "price": 7, "n": 4}
    before = f"{PHOTOS}@{table.snapshots()[0].snapshot_id}"
    (row, _) = read_all(source(before, kept=("shop",)))
    assert row.kept == {"shop": "Käse 1"}, "a snapshot has the columns of its time"


@pytest.mark.wide
def test_image_in_a_struct(catalog: Catalog) -> None:
    kind = pa.struct([("path", pa.string()), ("bytes", pa.binary())])
    table = catalog.create_table("shop.photos", pa.schema([("photo", kind), ("tags", pa.list_(pa.string()))]))
    table.append(pa.table({"photo": pa.array([{"path": "a.jpg", "bytes": b"1"}], kind), "tags": [["x", "y"]]}))
    assert read_all(source(id="photo.path", kept=("tags",))) == [Answerable("a.jpg", b"1", "", {"tags": ["x", "y"]})]


@pytest.mark.wide
def test_path_of_an_image_must_be_absolute(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"one")
    table = catalog.create_table("shop.photos", pa.schema([("image", pa.string())]))
    table.append(pa.table({"image": [f"{tmp_path}/1.png", "2.png"]}))
    first, second = read_all(source(id="", image="image"))
    assert first.content == b"one"
    assert "relative to a data file" in second.error


@pytest.mark.usefixtures("table")
def test_unknown_catalogs_tables_columns_and_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, words in (
        ("iceberg:nope/shop.photos", r"no catalog named 'nope' \(configure it on every node, in \.pyiceberg\.yaml"),
        ("iceberg:lake/shop.nope", r"there is no table iceberg:lake/shop\.nope"),
        ("iceberg:lake/nope.photos", r"there is no table iceberg:lake/nope\.photos"),
        (f"{PHOTOS}@nope", r"has no snapshot nope: it was expired, or never existed .*newest one is"),
        (f"{PHOTOS}@7", "has no snapshot 7"),
    ):
        with pytest.raises(ScoringError, match=words):
            plan(source(text))
    for columns in ({"kept": ("nope",)}, {"id": "nope"}, {"image": "nope"}):
        with pytest.raises(ScoringError, match=r"has no column 'nope' .*image, n, shop, day"):
            plan(source(**columns))
    for text in ("iceberg:lake", "iceberg:lake/photos", "iceberg:/shop.photos", "iceberg:lake/a/b.c", f"{PHOTOS}@"):
        with pytest.raises(ScoringError, match="names no Iceberg table"):
            TableName.parse(text)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", "http://127.0.0.1:9/")
    configure({}, monkeypatch)
    with pytest.raises(SourceUnavailable, match=r"catalog lake: .*refused.*is its catalog running"):
        plan(source())


@pytest.mark.wide
def test_table_without_rows_is_refused(catalog: Catalog, table: Table) -> None:
    catalog.create_table("shop.empty", SCHEMA)
    with pytest.raises(ScoringError, match="has no snapshot, and so no rows"):
        plan(source("iceberg:lake/shop.empty"))
    table.delete()
    with pytest.raises(ScoringError, match="has no rows"):
        plan(source())


@pytest.mark.wide
def test_damaged_and_missing_files_are_named(table: Table) -> None:
    units = plan(source())
    path = data_paths(table)[0]
    whole = local(path).read_bytes()
    local(path).write_bytes(whole[:-100])
    with pytest.raises(ScoringError, match=r"has \d+ bytes, but .* counts \d+: it is damaged"):
        plan(source())
    (unit,) = (unit for unit in units if unit.path == path)
    with pytest.raises(ScoringError, match="it is damaged"):
        read_unit(source(), unit)
    local(path).write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(ScoringError, match="is not a valid Parquet file"):
        plan(source())
    local(path).unlink()
    with pytest.raises(ScoringError, match=r"counts .*\.parquet, which is gone: was the snapshot expired\?"):
        plan(source())
    local(table.current_snapshot().manifest_list).unlink()  # type: ignore[union-attr]
    with pytest.raises(ScoringError, match="its metadata is gone"):
        plan(source())


def request(tmp_path: Path, **changes: Any) -> ScoreRequest:
    made = ScoreRequest(source=PHOTOS, model="m", destination=str(tmp_path / "out"), id_column="n")
    return replace(made, **changes)


def test_unfinished_run_keeps_its_snapshot(table: Table, tmp_path: Path) -> None:
    destination = destination_at(str(tmp_path / "out"))
    destination.prepare()
    first = pin_snapshot(request(tmp_path), destination.notes)
    note_snapshot(first, destination.notes)
    table.overwrite(rows(4, 5))
    again = pin_snapshot(request(tmp_path), destination.notes)
    assert again == first
    assert len(read_all(open_source(again))) == 3
    named = pin_snapshot(request(tmp_path, source=f"{PHOTOS}@main"), destination.notes)
    assert len(read_all(open_source(named))) == 2, "another snapshot was asked for"
    table.maintenance.expire_snapshots().by_id(int(first.snapshot)).commit()
    with pytest.raises(ScoringError, match=f"has no snapshot {first.snapshot}: it was expired"):
        plan(open_source(pin_snapshot(request(tmp_path), destination.notes)))
    destination.notes.delete("_snapshot.json")
    assert len(read_all(open_source(pin_snapshot(request(tmp_path), destination.notes)))) == 2
