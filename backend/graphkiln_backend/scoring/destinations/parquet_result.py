"""A unit's result as a Parquet file, and what the file says of it without being read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.scoring.destinations.base import Committed, Result
from graphkiln_backend.scoring.errors import ScoringError

_UNIT, _CONFIGURATION, _ERRORS, _ATTEMPT = (
    f"graphkiln.{key}".encode() for key in ("unit", "configuration", "errors", "attempt")
)


def encode_result(result: Result, attempt: str) -> memoryview:
    """The bytes of its file.

    Args:
        result: What is written.
        attempt: Tells this attempt from all others of the unit.
    """
    table = result.table.replace_schema_metadata(
        {
            _UNIT: result.unit_id,
            _CONFIGURATION: result.configuration,
            _ERRORS: str(result.errors),
            _ATTEMPT: attempt,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return memoryview(sink.getvalue())


def read_committed(unit_id: str, place: str, metadata: pq.FileMetaData) -> Committed:
    """What a file says of its unit.

    Args:
        unit_id: The unit whose place the file stands in.
        place: The file.
        metadata: Its footer.

    Raises:
        ScoringError: The file is not that unit's, or contradicts itself.
    """
    written = metadata.metadata or {}
    if written.get(_UNIT) != unit_id.encode():
        raise ScoringError("it does not hold the result of the unit that it is named after")
    errors = int(written[_ERRORS])
    if errors != _count_errors(metadata):
        raise ScoringError(f"it says that {errors} rows have an error, and {_count_errors(metadata)} have")
    configuration = written[_CONFIGURATION].decode()
    scored = metadata.num_rows - errors
    return Committed(unit_id=unit_id, place=place, configuration=configuration, scored=scored, errors=errors)


def read_columns(source: Any, columns: list[str]) -> pa.Table:
    """Columns of a file, in one thread; the checksums of its pages are looked at.

    Args:
        source: A path, or a file object that can seek.
        columns: Their names.

    Raises:
        pa.ArrowInvalid: It is damaged.
        OSError: It cannot be read.
    """
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        return file.read(columns=columns, use_threads=False)


def _count_errors(metadata: pq.FileMetaData) -> int:
    """Rows whose column `error` holds something, by the statistics of the file."""
    column = next(index for index in range(metadata.num_columns) if metadata.schema.column(index).path == "error")
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return sum(group.num_rows - group.column(column).statistics.null_count for group in groups if group.num_rows)
