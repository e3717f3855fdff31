"""Verify a destination: every planned row has one result, and all results are of one configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from graphkiln_backend.scoring.destinations.base import Committed, Destination
from graphkiln_backend.scoring.errors import ScoringError, StoreError
from graphkiln_backend.scoring.messages import Unit
from graphkiln_backend.scoring.row_hashes import Hashes, RowHashes, hash_ids

_READERS = 8
_UNITS_AT_ONCE = 256
_NAMED = 3
_AGAIN = "run the same command again: it scores what is missing"
_REMOVE = "remove it and run the same command again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A defect of a unit's result.

    Attributes:
        place: File, object or table of the result; the path of the input if there is no result.
    """

    unit_id: str
    place: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"unit {self.unit_id} ({self.place}): {self.message} ({self.hint})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Comparison of a destination with its plan.

    Attributes:
        units: Planned units.
        inputs: Planned rows.
        scored: Rows with an answer, in readable results of planned units.
        errors: Rows with an error in these results.
        configurations: Configuration digests of the results.
        findings: Defects.
    """

    units: int
    inputs: int
    scored: int
    errors: int
    configurations: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every row of the plan is accounted for exactly once."""
        return not self.findings and self.inputs == self.scored + self.errors


def verify(destination: Destination, units: Iterable[Unit], *, spill: Path | None = None) -> Verification:
    """Compare a destination with a plan. Memory grows with the number of units, not of rows.

    Args:
        destination: The destination.
        units: Planned units, in any order.
        spill: Folder for hashes of row ids, 8 bytes each; None for the system's folder of temporary files.

    Raises:
        StoreError: The store cannot be read at all.
    """
    planned = {unit.id: (unit.rows, unit.path) for unit in units}
    committed = list(destination.describe(destination.visible_ids()))
    readable = [one for one in committed if not one.damage]
    findings = [
        *_find_missing(planned, committed),
        *(finding for one in committed for finding in _examine(one, planned)),
        *_find_mixed(readable),
    ]
    with RowHashes(spill) as hashes:
        findings += _find_unreadable(destination, readable, hashes)
        findings += _find_repeated(destination, readable, hashes.repeated())
    counted = [one for one in readable if one.unit_id in planned]
    return Verification(
        units=len(planned),
        inputs=sum(rows for rows, _ in planned.values()),
        scored=sum(one.scored for one in counted),
        errors=sum(one.errors for one in counted),
        configurations=tuple(sorted({one.configuration for one in readable})),
        findings=tuple(findings),
    )


def _find_missing(planned: Mapping[str, tuple[int, str]], committed: Sequence[Committed]) -> Iterator[Finding]:
    present = {one.unit_id for one in committed}
    for unit_id, (rows, path) in planned.items():
        if unit_id not in present:
            yield Finding(unit_id=unit_id, place=path, message=f"none of its {rows} rows has a result", hint=_AGAIN)


def _examine(one: Committed, planned: Mapping[str, tuple[int, str]]) -> Iterator[Finding]:
    """Find defects of a single result."""
    if one.damage:
        yield _finding(one, f"it is damaged: {one.damage}", _REMOVE)
    elif one.unit_id not in planned:
        hint = "its input has changed, or another run wrote it: --replace removes it"
        yield _finding(one, "the plan has no such unit", hint)
    elif one.scored + one.errors != (rows := planned[one.unit_id][0]):
        yield _finding(one, f"it has {one.scored} answers and {one.errors} errors for {rows} rows", _REMOVE)


def _find_mixed(committed: Sequence[Committed]) -> Iterator[Finding]:
    """Find results of another configuration than most."""
    counts = Counter(one.configuration for one in committed)
    for one in committed:
        (most, _), *_ = counts.most_common(1)
        if one.configuration != most:
            message = f"it was computed by configuration {one.configuration}, most by {most}"
            yield _finding(one, message, "use a separate destination for each model and each set of settings")


def _find_unreadable(destination: Destination, committed: Sequence[Committed], hashes: RowHashes) -> Iterator[Finding]:
    """Add the ids of all rows to `hashes`; find results that cannot be read or have a wrong row count."""
    for one, ids in _read_ids(destination, committed):
        if isinstance(ids, ScoringError):
            yield _finding(one, ids.message, _REMOVE)
            continue
        if len(ids) != one.scored + one.errors:
            yield _finding(one, f"its metadata has {one.scored + one.errors} rows, its data {len(ids)}", _REMOVE)
        hashes.add(ids)


def _find_repeated(destination: Destination, committed: Sequence[Committed], repeated: Hashes) -> Iterator[Finding]:
    """Find row ids that occur more than once; reported for each unit except the first."""
    first: dict[object, str] = {}
    for one, ids in _read_ids(destination, committed) if len(repeated) else ():
        if isinstance(ids, ScoringError):
            continue
        again = []
        for index in np.flatnonzero(np.isin(hash_ids(ids), repeated)):
            value = ids[int(index)].as_py()
            if value in first:
                again.append(f"{value!r} (also in {first[value]})")
            first.setdefault(value, one.unit_id)
        if again:
            message = f"{len(again)} of its rows occur twice: {', '.join(again[:_NAMED])}"
            yield _finding(one, message, "give each row of the input its own id")


def _read_ids(
    destination: Destination, committed: Sequence[Committed]
) -> Iterator[tuple[Committed, pa.ChunkedArray | ScoringError]]:
    """Read the row ids of results in parallel, some hundred results at a time."""

    def read(one: Committed) -> tuple[Committed, pa.ChunkedArray | ScoringError]:
        try:
            return one, destination.read(one.unit_id, ["id"]).column(0)
        except StoreError:
            raise
        except ScoringError as error:
            return one, error

    waiting = iter(committed)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="ids") as pool:
        while piece := list(islice(waiting, _UNITS_AT_ONCE)):
            yield from pool.map(read, piece)


def _finding(one: Committed, message: str, hint: str) -> Finding:
    return Finding(unit_id=one.unit_id, place=one.place, message=message, hint=hint)
