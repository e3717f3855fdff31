"""Iceberg tables as destinations: one snapshot, once, with values as other readers see them."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_tables import configure, open_catalog
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from scoring_runs import destination_at

from graphkiln_backend.scoring.destinations import iceberg
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.iceberg import PROPERTY, IcebergDestination
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError
from graphkiln_backend.scoring.iceberg import ResultTable
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.verify import verify

ANSWERS = "iceberg:lake/shop.answers"
UNITS = [
    InputRange(path=f"photos/{number}", part="", identity=str(number), rows=2).unit("model") for number in range(4)
]


class Killed(BaseException):
    """The driver is dead from here on."""


def result(of: Unit, kind: pa.DataType | None = None) -> Result:
    columns = {
        "id": [f"{of.path}/0", f"{of.path}/1"],
        "scores": pa.array([[0.5, 0.25], None], pa.list_(kind or pa.float32())),
        "kept": pa.nulls(2),
        "error": pa.array([None, "bad"], pa.string()),
    }
    return Result(unit_id=of.id, configuration="model", table=pa.table(columns))


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setattr(iceberg, "_PAUSE_S", 0.0)
    return open_catalog(tmp_path / "lake", monkeypatch)


def opened() -> IcebergDestination:
    """As a new driver opens it."""
    made = destination_at(ANSWERS)
    assert isinstance(made, IcebergDestination)
    made.declare(lambda: result(UNITS[0]).table.schema)
    return made


def run(*units: Unit, replaced: tuple[Unit, ...] = ()) -> None:
    """What a driver does at the destination."""
    destination = opened()
    destination.prepare()
    committed = set(destination.committed_ids())
    destination.remove([unit.id for unit in replaced])
    for unit in units:
        if unit.id not in committed:
            destination.commit(result(unit))
    assert set(destination.committed_ids()) == {unit.id for unit in units}
    publish(destination, *units)


def publish(destination: IcebergDestination, *units: Unit) -> None:
    destination.publish((unit.id for unit in units), lambda: None)


def ids(catalog: Catalog, snapshot_id: int | None = None) -> list[str]:
    found = catalog.load_table("shop.answers").scan(snapshot_id=snapshot_id).to_arrow()
    return sorted(found.column("id").to_pylist())


def expected(*units: Unit) -> list[str]:
    return sorted(f"{unit.path}/{row}" for unit in units for row in range(2))


def commits(catalog: Catalog) -> list[str]:
    """Ids of commits in the table's history."""
    summaries = [snapshot.summary for snapshot in catalog.load_table("shop.answers").snapshots()]
    return [summary[PROPERTY] for summary in summaries if summary and summary[PROPERTY]]


def test_readers_see_nothing_until_one_snapshot_has_all(catalog: Catalog) -> None:
    destination = opened()
    destination.prepare()
    for unit in UNITS:
        destination.commit(result(unit))
    assert ids(catalog) == []
    assert not verify(destination, UNITS).ok
    assert re.match(
        r"4 units are finished in .*/_graphkiln, but not in iceberg:lake/shop\.answers", destination.unpublished()
    )
    publish(destination, *UNITS)
    assert ids(catalog) == expected(*UNITS)
    assert len(catalog.load_table("shop.answers").snapshots()) == len(commits(catalog)) == 1
    assert verify(destination, UNITS).ok
    assert destination.unpublished() == ""
    run(*UNITS)
    assert len(commits(catalog)) == 1, "there was nothing to add"


@pytest.mark.wide
def test_changed_input_replaces_units_in_one_snapshot_and_back(catalog: Catalog) -> None:
    run(*UNITS[:2])
    run(*UNITS[:3])
    assert ids(catalog) == expected(*UNITS[:3])
    run(*UNITS[1:], replaced=(UNITS[0],))
    assert ids(catalog) == expected(*UNITS[1:])
    assert verify(opened(), UNITS[1:]).ok
    run(*UNITS[:3], replaced=(UNITS[3],))
    assert ids(catalog) == expected(*UNITS[:3])
    assert verify(opened(), UNITS[:3]).ok
    snapshots = catalog.load_table("shop.answers").snapshots()
    assert [len(ids(catalog, each.snapshot_id)) for each in snapshots] == [4, 6, 6, 6], "older snapshots are readable"


def at_commit(monkeypatch: pytest.MonkeyPatch, *actions: Callable[[Callable[[], Any]], Any]) -> None:
    """Let actions make the next requests to the catalog that change a table; later ones are made as usual."""
    original, waiting = SqlCatalog.commit_table, list(actions)

    def commit(self: SqlCatalog, table: Table, requirements: Any, updates: Any) -> Any:
        def send() -> Any:
            return original(self, table, requirements, updates)

        return waiting.pop(0)(send) if waiting else send()

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)


def kill_before(_: Callable[[], Any]) -> Any:
    raise Killed


def kill_after(send: Callable[[], Any]) -> Any:
    send()
    raise Killed


def lose_response(send: Callable[[], Any]) -> Any:
    send()
    raise OSError("connection reset")


def be_down(_: Callable[[], Any]) -> Any:
    raise OSError("connection refused")


def staged(*units: Unit) -> IcebergDestination:
    destination = opened()
    destination.prepare()
    for unit in units:
        destination.commit(result(unit))
    return destination


@pytest.mark.parametrize("kill", [kill_before, kill_after])
def test_killed_in_the_commit(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, kill: Any) -> None:
    destination = staged(*UNITS)
    at_commit(monkeypatch, kill)
    with pytest.raises(Killed):
        publish(destination, *UNITS)
    for _ in range(2):
        run(*UNITS)
        assert ids(catalog) == expected(*UNITS)
        assert len(commits(catalog)) == 1


def test_request_of_a_dead_driver_that_arrives_late(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the next driver has looked for it, and before it commits itself."""
    late: list[Callable[[], Any]] = []

    def delay(send: Callable[[], Any]) -> Any:
        late.append(send)
        raise Killed

    def overtake(send: Callable[[], Any]) -> Any:
        late[0]()
        return send()

    destination = staged(*UNITS)
    at_commit(monkeypatch, delay, overtake)
    with pytest.raises(Killed):
        publish(destination, *UNITS)
    run(*UNITS)
    assert ids(catalog) == expected(*UNITS)
    assert len(commits(catalog)) == 1
    assert len(late) == 1


@pytest.mark.wide
@pytest.mark.parametrize("fault", [lose_response, be_down])
def test_catalog_that_fails_is_asked_again(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    destination = staged(*UNITS)
    at_commit(monkeypatch, fault, fault)
    publish(destination, *UNITS)
    assert ids(catalog) == expected(*UNITS)
    assert len(commits(catalog)) == 1


@pytest.mark.wide
def test_catalog_that_stays_down(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "_ATTEMPTS", 3)
    destination = staged(*UNITS)
    at_commit(monkeypatch, *[be_down] * 3)
    with pytest.raises(StoreError, match="connection refused"):
        publish(destination, *UNITS)
    assert ids(catalog) == []
    run(*UNITS)
    assert ids(catalog) == expected(*UNITS)


def test_other_writers_commit_meanwhile(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtake(send: Callable[[], Any]) -> Any:
        append_foreign(catalog)
        return send()

    destination = staged(*UNITS)
    at_commit(monkeypatch, overtake, lambda send: send(), overtake)
    publish(destination, *UNITS)
    assert len(commits(catalog)) == 1
    foreign = len(catalog.load_table("shop.answers").snapshots()) - 1
    assert foreign >= 1
    assert ids(catalog) == sorted([*expected(*UNITS), *["foreign"] * foreign])
    run(*UNITS)
    assert verify(opened(), UNITS).ok
    left = [path for path in (opened_folder(catalog) / "metadata").iterdir() if path.name.startswith("snap-")]
    assert len(left) == foreign + 1, "refused attempts leave no lists of manifests"


def append_foreign(catalog: Catalog) -> None:
    table = catalog.load_table("shop.answers")
    row = {"id": ["foreign"], "scores": [[1.0]], "kept": [None], "error": [None]}
    columns = {"scores": pa.list_(pa.float32()), "kept": pa.string(), "error": pa.string()}
    table.append(pa.table({name: pa.array(value, columns.get(name)) for name, value in row.items()}))


def opened_folder(catalog: Catalog) -> Path:
    return Path(catalog.load_table("shop.answers").location().removeprefix("file://"))


def test_checks_see_a_planted_second_commit(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for the first commit, the tests above would find each row twice."""
    destination = staged(*UNITS)
    at_commit(monkeypatch, kill_after)
    with pytest.raises(Killed):
        publish(destination, *UNITS)
    monkeypatch.setattr(ResultTable, "find_snapshot", lambda *_: None)
    monkeypatch.setattr(ResultTable, "keeps_successor", lambda *_: True)
    monkeypatch.setattr(ResultTable, "files_below", lambda *_: {})
    publish(opened(), *UNITS)
    assert ids(catalog) == sorted(expected(*UNITS) * 2)
    assert len(commits(catalog)) == 2


@pytest.mark.wide
def test_commit_that_cannot_be_known_is_refused(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = staged(*UNITS)
    append_foreign(catalog)
    at_commit(monkeypatch, kill_after)
    with pytest.raises(Killed):
        publish(destination, *UNITS)
    table = catalog.load_table("shop.answers")
    table.delete()
    append_foreign(catalog)
    table.refresh()
    expire = table.maintenance.expire_snapshots()
    for snapshot in table.snapshots()[:-1]:
        expire = expire.by_id(snapshot.snapshot_id)
    expire.commit()
    with pytest.raises(
        ScoringError, match=r"snapshots have been expired since: it cannot be known .*another destination"
    ):
        publish(opened(), *UNITS)
    assert ids(catalog) == ["foreign"]


@pytest.mark.wide
def test_rewritten_table_is_refused(catalog: Catalog) -> None:
    run(*UNITS)
    table = catalog.load_table("shop.answers")
    table.overwrite(table.scan().to_arrow())  # as a compaction
    for ask in (lambda: opened().prepare(), lambda: verify(opened(), UNITS)):
        with pytest.raises(ScoringError, match=r"was rewritten by another program: of 4 files of units it has 0"):
            ask()
    assert ids(catalog) == expected(*UNITS)


@pytest.mark.wide
def test_table_that_is_rewritten_after_a_kill_has_the_results_once(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = staged(*UNITS)
    at_commit(monkeypatch, kill_after)
    with pytest.raises(Killed):
        publish(destination, *UNITS)
    table = catalog.load_table("shop.answers")
    table.overwrite(table.scan().to_arrow())
    run(*UNITS)
    assert ids(catalog) == expected(*UNITS)


def test_other_tables_are_refused_and_left_alone(catalog: Catalog) -> None:
    schema = pa.schema([("id", pa.string()), ("scores", pa.list_(pa.float64())), ("kept", pa.string())])
    catalog.create_table("shop.answers", schema)
    with pytest.raises(ScoringError, match=r"other columns than the results: error string \(it is None\), scores list"):
        opened().prepare()
    catalog.drop_table("shop.answers")
    opened().prepare()
    with catalog.load_table("shop.answers").update_spec() as update:
        update.add_identity("kept")
    with pytest.raises(ScoringError, match="is partitioned"):
        opened().prepare()
    assert catalog.load_table("shop.answers").current_snapshot() is None


@pytest.mark.wide
def test_table_of_the_user_with_columns_in_another_order(catalog: Catalog) -> None:
    schema = result(UNITS[0]).table.schema
    fields = [schema.field(name) for name in ("error", "id", "scores")]
    catalog.create_table("shop.answers", pa.schema([*fields, ("kept", pa.string())]))
    run(*UNITS)
    assert ids(catalog) == expected(*UNITS)


@pytest.mark.wide
@pytest.mark.usefixtures("catalog")
def test_other_columns_are_refused_by_a_unit() -> None:
    destination = staged(UNITS[0])
    with pytest.raises(ScoringError, match="has other columns than the results: scores"):
        destination.commit(result(UNITS[1], pa.float64()))
    assert list(destination.committed_ids()) == [UNITS[0].id]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("iceberg:nope/shop.answers", "no catalog named 'nope'"),
        ("iceberg:lake/nope.answers", "no namespace nope .*create namespace nope"),
        ("iceberg:lake/answers", "names no Iceberg table"),
        (f"{ANSWERS}@5", "cannot be written to snapshot 5"),
    ],
)
def test_unknown_places_are_refused(catalog: Catalog, text: str, words: str) -> None:
    def prepare() -> None:
        made = destination_at(text)
        made.declare(lambda: result(UNITS[0]).table.schema)
        made.prepare()

    with pytest.raises(ScoringError, match=words):
        prepare()
    assert catalog.list_tables("shop") == []


@pytest.mark.wide
def test_catalog_that_is_down(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(catalog, SqlCatalog)
    configure({"PYICEBERG_CATALOG__LAKE__URI": "http://127.0.0.1:9/"}, monkeypatch)
    with pytest.raises(StoreError, match=r"catalog lake: .*refused.*is its catalog running"):
        opened().prepare()


@pytest.mark.wide
def test_without_a_run_there_is_nothing_to_verify(catalog: Catalog) -> None:
    assert not opened().exists
    with pytest.raises(ScoringError, match=r"there is no table iceberg:lake/shop\.answers"):
        verify(destination_at(ANSWERS), UNITS)
    with pytest.raises(NoSuchTableError):
        catalog.load_table("shop.answers")


@pytest.mark.wide
def test_a_second_attempt_is_refused(catalog: Catalog) -> None:
    destination = staged(*UNITS)
    with pytest.raises(CommitConflict):
        opened().commit(result(UNITS[0]))
    publish(destination, *UNITS)
    with pytest.raises(CommitConflict):
        opened().commit(result(UNITS[0]))
    assert ids(catalog) == expected(*UNITS)


@pytest.mark.wide
def test_notes_are_hidden_from_the_removal_of_orphan_files(catalog: Catalog) -> None:
    run(*UNITS)
    own = {path.relative_to(opened_folder(catalog)).parts[0] for path in opened_folder(catalog).rglob("*")}
    assert own == {"_graphkiln", "metadata"}
    note = json.loads((opened_folder(catalog) / "_graphkiln" / "_commit.json").read_text())
    assert [note["id"]] == commits(catalog)


COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "i8": (pa.int8(), -7),
    "u8": (pa.uint8(), 200),
    "u16": (pa.uint16(), 60_000),
    "u32": (pa.uint32(), 4_000_000_000),
    "u64": (pa.uint64(), 2**64 - 1),
    "half": (pa.float16(), 0.5),
    "list": (pa.list_(pa.uint8()), [200, 1]),
    "fixed": (pa.list_(pa.float32(), 2), [0.5, 0.25]),
    "struct": (pa.struct([("n", pa.uint16()), ("t", pa.large_string())]), {"n": 60_000, "t": "x"}),
    "structs": (pa.list_(pa.struct([("n", pa.list_(pa.list_(pa.int8())))])), [{"n": [[1], [2]]}]),
    "bytes": (pa.binary(2), b"ab"),
    "word": (pa.dictionary(pa.int8(), pa.string()), "x"),
    "day": (pa.date64(), datetime.date(2026, 2, 28)),
    "time": (pa.time64("ns"), datetime.time(1, 2, 3)),
    "nothing": (pa.null(), None),
}


def table_of(columns: dict[str, pa.Array]) -> pa.Table:
    made = pa.table({"id": ["a"], **columns})
    return made.append_column("error", pa.nulls(1, pa.string()))


def write(table: pa.Table) -> None:
    made = destination_at(ANSWERS)
    made.declare(lambda: table.schema)
    made.prepare()
    made.commit(Result(unit_id=UNITS[0].id, configuration="model", table=table))
    made.publish([UNITS[0].id], lambda: None)


def test_other_readers_see_the_same_values(catalog: Catalog) -> None:
    columns = {}
    for name, (kind, value) in COLUMNS.items():
        given = [value] if not pa.types.is_float16(kind) else None
        columns[name] = pa.array(given, kind) if given else pa.array([value], pa.float32()).cast(kind)
    columns["here"] = pa.array([1_007], pa.timestamp("ns"))
    columns["there"] = pa.array([5], pa.timestamp("s", "+02:00"))
    write(table_of(columns))
    read = catalog.load_table("shop.answers").scan().to_arrow()
    (row,) = read.drop_columns(["here", "there"]).to_pylist()
    values = {name: value for name, (_, value) in COLUMNS.items()}
    assert row == {"id": "a", **values, "u64": Decimal(2**64 - 1), "error": None}
    assert read.column("here").cast(pa.int64()).to_pylist() == [1]
    assert read.column("there").cast(pa.int64()).to_pylist() == [5_000_000]


@pytest.mark.wide
def test_files_have_field_ids_and_columns_their_shape(catalog: Catalog) -> None:
    field = pa.field("OUTPUT", pa.list_(pa.float32()), metadata={"shape": "[2, 2]"})
    made = pa.table([["a"], [[1.0, 2.0, 3.0, 4.0]], pa.nulls(1, pa.string())],
                    schema=pa.schema([("id", pa.string()), field, ("error", pa.string())]))  # fmt: skip
    write(made)
    table = catalog.load_table("shop.answers")
    assert table.schema().find_field("OUTPUT").doc == "shape [2, 2]"
    (task,) = table.scan().plan_files()
    written = pq.read_schema(task.file.file_path.removeprefix("file://"))
    assert [field.metadata[b"PARQUET:field_id"] for field in written] == [b"1", b"2", b"3"]
    assert task.file.record_count == 1


@pytest.mark.wide
def test_unsupported_type_is_refused_and_leaves_no_table(catalog: Catalog) -> None:
    with pytest.raises(ScoringError, match=r"Iceberg has no column for this: .*duration.*--keep-columns"):
        write(table_of({"t": pa.array([1], pa.duration("us"))}))
    assert catalog.list_tables("shop") == []
