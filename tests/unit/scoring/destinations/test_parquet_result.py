"""What a Parquet file says of its unit."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.parquet import (
    encode_result,
)

UNIT = "0" * 32


def encoded(errors: list[str | None]) -> io.BytesIO:
    table = pa.table({"id": [str(index) for index in range(len(errors))], "error": pa.array(errors, pa.string())})
    return io.BytesIO(encode_result(Result(unit_id=UNIT, configuration="model", table=table), "attempt"))


def test_what_the_input_said_of_its_schema_is_not_carried_along() -> None:
    table = pa.table({"id": ["x"], "error": pa.array([None], pa.string())}).replace_schema_metadata({"pandas": "large"})
    written = pq.read_metadata(io.BytesIO(encode_result(Result(unit_id=UNIT, configuration="m", table=table), "a")))
    assert b"pandas" not in (written.metadata or {})
