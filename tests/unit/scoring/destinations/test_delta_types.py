"""What is written into a Delta table is read by others with the same values."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.delta import as_delta, delta_schema
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.opening import destination_at

UNIT = "0" * 32
COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "u8": (pa.uint8(), 200),
    "u16": (pa.uint16(), 60_000),
    "u32": (pa.uint32(), 4_000_000_000),
    "u64": (pa.uint64(), 2**64 - 1),
    "list": (pa.list_(pa.uint8()), [200, 1]),
    "fixed": (pa.list_(pa.float32(), 2), [0.5, 0.25]),
    "struct": (pa.struct([("n", pa.uint16()), ("t", pa.large_string())]), {"n": 60_000, "t": "x"}),
    "bytes": (pa.binary(2), b"ab"),
    "word": (pa.dictionary(pa.int8(), pa.string()), "x"),
    "nothing": (pa.null(), None),
}


def committed(folder: Path, table: pa.Table) -> pa.Table:
    destination = destination_at(str(folder), format="delta")
    destination.prepare()
    table = table.append_column("error", pa.nulls(len(table), pa.string()))
    destination.commit(Result(unit_id=UNIT, configuration="model", table=table))
    return DeltaTable(folder).to_pyarrow_table()


def test_other_readers_see_the_same_values(tmp_path: Path) -> None:
    table = pa.table({name: pa.array([value], kind) for name, (kind, value) in COLUMNS.items()})
    (row,) = committed(tmp_path / "out", table).to_pylist()
    expected = {name: value for name, (_, value) in COLUMNS.items()} | {"u64": Decimal(2**64 - 1), "error": None}
    assert row == expected


def test_times_have_microseconds(tmp_path: Path) -> None:
    table = pa.table(
        {"here": pa.array([1_007], pa.timestamp("ns")), "there": pa.array([5], pa.timestamp("s", "+02:00"))}
    )
    read = committed(tmp_path / "out", table)
    assert read.column("here").cast(pa.int64()).to_pylist() == [1]
    assert read.column("there").cast(pa.int64()).to_pylist() == [5_000_000]


def test_what_delta_has_stays_as_it_is() -> None:
    schema = pa.schema([pa.field("a", pa.list_(pa.float32()), metadata={"shape": "2"}), ("b", pa.int8())], {"x": "y"})
    assert delta_schema(schema).equals(schema, check_metadata=True)
    table = pa.table({"a": [1]})
    assert as_delta(table).equals(table)


def test_what_delta_lacks_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"Delta has no column for this: .*Time64.*--keep-columns") as raised:
        committed(tmp_path / "out", pa.table({"t": pa.array([1], pa.time64("us"))}))
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "out").iterdir()) == []
