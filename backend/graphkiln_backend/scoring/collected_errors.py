"""The rows with an error, of all units, in one file beside the results: what a person looks at first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder

ERRORS = "_errors.parquet"
_SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("unit", pa.string()), pa.field("reason", pa.string())])


def collect_errors(destination: Destination, unit_ids: Iterable[str], stay: Callable[[], None] = lambda: None) -> int:
    """Writes the note `_errors.parquet` (id, unit, reason); it is derived from the results, and written anew each time.

    Args:
        destination: Where the results are.
        unit_ids: Units that have a result; memory holds the rows of one.
        stay: Called for each: what must be done for the run to stay the only one.

    Returns:
        How many rows it has.

    Raises:
        ScoringError: A result cannot be read, or the note cannot be written.
    """
    count = 0
    with scratch_folder(Scratch.ERRORS) as folder:
        path = folder.path / ERRORS
        with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
            for one in destination.describe(unit_ids):
                stay()
                if one.errors:
                    table = _errors_of(destination, one.unit_id)
                    writer.write_table(table)
                    count += len(table)
        destination.write_note(ERRORS, path)
    return count


def _errors_of(destination: Destination, unit_id: str) -> pa.Table:
    rows = destination.read(unit_id, ["id", "error"])
    wrong = rows.filter(rows.column("error").is_valid())
    columns = [wrong.column("id").cast(pa.string()), pa.repeat(unit_id, len(wrong)), wrong.column("error")]
    return pa.table(columns, schema=_SCHEMA)
