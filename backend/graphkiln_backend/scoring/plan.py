"""The plan: every unit of a run, as a Parquet file that is streamed, written and read in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.units import InputRange, Unit

# What is held in memory: a unit of a listing is a few bytes, one of a folder names a thousand files.
_PIECE_UNITS, _PIECE_BYTES = 1000, 4 * MIB
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("path", pa.string()),
        pa.field("part", pa.large_string()),
        pa.field("rows", pa.int64()),
        pa.field("size_bytes", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTotals:
    """How much a plan holds; the bytes of listed images are not known, as nothing was asked of them."""

    units: int = 0
    rows: int = 0
    size_bytes: int = 0

    def plus(self, found: Sequence[Unit]) -> PlanTotals:
        """With some more."""
        return PlanTotals(
            units=self.units + len(found),
            rows=self.rows + sum(one.rows for one in found),
            size_bytes=self.size_bytes + sum(one.size_bytes for one in found),
        )


def write_plan(path: Path, ranges: Iterable[InputRange], configuration: str) -> PlanTotals:
    """Writes a plan.

    Args:
        path: The file.
        ranges: What the source finds.
        configuration: Digest of all else that changes an answer.
    """
    totals = PlanTotals()
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for piece in _pieces(found.unit(configuration) for found in ranges):
            writer.write_batch(_batch(piece))
            totals = totals.plus(piece)
    return totals


def read_plan(path: Path) -> Iterator[Unit]:
    """The units of a plan, in its order, a piece at a time."""
    with pq.ParquetFile(path) as file:
        for index in range(file.num_row_groups):
            for row in file.read_row_group(index).to_pylist():
                yield Unit(**row)


def _pieces(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Units that are written together."""
    piece: list[Unit] = []
    size = 0
    for unit in units:
        piece.append(unit)
        size += len(unit.part)
        if len(piece) == _PIECE_UNITS or size > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _batch(units: list[Unit]) -> pa.RecordBatch:
    columns = [
        pa.array([getattr(unit, name) for unit in units], kind)
        for name, kind in zip(_SCHEMA.names, _SCHEMA.types, strict=True)
    ]
    return pa.record_batch(columns, schema=_SCHEMA)
