"""The plan of a run: its units, as a Parquet file that is streamed, and what the destination holds of them already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.units import InputRange, Unit

PLAN = "_plan.parquet"  # the note that a destination keeps
# Units that are held in memory: one of a listing is a few bytes, one of a folder names a thousand files.
_PIECE_UNITS, _PIECE_BYTES = 1000, 4 * MIB
_REMOVED_TOGETHER = 1000  # units between two looks at the lock
_NAMED = 3  # units that a message names
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
    """Size of a plan; the bytes of listed images are not known, as nothing was asked of them."""

    units: int = 0
    rows: int = 0
    size_bytes: int = 0

    def plus(self, found: Sequence[Unit]) -> PlanTotals:
        """Add some units."""
        return PlanTotals(
            units=self.units + len(found),
            rows=self.rows + sum(one.rows for one in found),
            size_bytes=self.size_bytes + sum(one.size_bytes for one in found),
        )


def write_plan(path: Path, ranges: Iterable[InputRange], configuration: str) -> PlanTotals:
    """Write the units of a source's ranges under a configuration, the digest of all else that changes an answer."""
    totals = PlanTotals()
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for piece in _pieces(found.unit(configuration) for found in ranges):
            writer.write_batch(_batch(piece))
            totals = totals.plus(piece)
    return totals


def read_plan(path: Path) -> Iterator[Unit]:
    """Read the units of a plan in its order, a piece at a time."""
    with pq.ParquetFile(path) as file:
        for index in range(file.num_row_groups):
            for row in file.read_row_group(index).to_pylist():
                yield Unit(**row)


def _pieces(units: Iterable[Unit]) -> Iterator[list[Unit]]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The state of a destination when a run begins.

    Attributes:
        committed: Ids of all units that have a result.
        done_units: How many of them are planned.
        done_rows: Rows of those.
        stale: Ids of those that are not planned.
    """

    committed: frozenset[str]
    done_units: int
    done_rows: int
    stale: frozenset[str]


def read_resume_state(destination: Destination, plan: Path) -> ResumeState:
    """List a destination once and go through a plan once."""
    committed = frozenset(destination.committed_ids())
    stale, units, rows = set(committed), 0, 0
    for unit in read_plan(plan):
        if unit.id in committed:
            units, rows = units + 1, rows + unit.rows
            stale.discard(unit.id)
    return ResumeState(committed=committed, done_units=units, done_rows=rows, stale=frozenset(stale))


def settle_stale(
    destination: Destination,
    stale: frozenset[str],
    configuration: str,
    *,
    replace: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Refuse, or remove, results that are not of this run's input.

    Args:
        destination: Where they are.
        stale: Their ids.
        configuration: Digest of this run.
        replace: Whether those of an input that changed are removed.
        check: Raises where the lock is lost; called before each piece is removed.

    Raises:
        ScoringError: They are of another model or other settings, or must not be removed.
    """
    if not stale:
        return
    others = {each.configuration for each in destination.describe(stale) if not each.damage} - {configuration}
    if others:
        raise ScoringError(
            "the destination holds results of another model, another version or other settings",
            hint="results of two are never mixed: name another destination for this run",
        )
    if not replace:
        raise ScoringError(
            f"the destination holds {len(stale)} units that are not part of this input: files have changed or are "
            "gone, or units were cut otherwise",
            hint="--replace removes their rows and scores what took their place",
        )
    remaining = sorted(stale)
    for begin in range(0, len(remaining), _REMOVED_TOGETHER):
        check()
        destination.remove(remaining[begin : begin + _REMOVED_TOGETHER])


def account(destination: Destination, plan: Path, reasons: Mapping[str, str]) -> None:
    """Check that the destination, listed anew, has a result of every unit that is planned, and no other one.

    What is in a unit needs no second look: a worker commits it only with all of its rows, and in one step.

    Args:
        destination: Where results are.
        plan: The file of the plan.
        reasons: Why units have no result, by their ids, where that is known.

    Raises:
        ScoringError: Some have none, or there are others.
    """
    committed = set(destination.committed_ids())
    missing: list[Unit] = []
    count = rows = 0
    for unit in read_plan(plan):
        if unit.id in committed:
            committed.discard(unit.id)
            continue
        count, rows = count + 1, rows + unit.rows
        if len(missing) < _NAMED:
            missing.append(unit)
    if count:
        named = "; ".join(
            f"unit {each.id} of {each.path}: {reasons.get(each.id, 'its result is gone')}" for each in missing
        )
        raise ScoringError(
            f"{count} units ({rows} rows) have no result: {named}",
            hint="all others have theirs; run the same command to try these again",
        )
    if committed:
        raise ScoringError(f"{len(committed)} units have a result but are not planned: does another run write there?")
