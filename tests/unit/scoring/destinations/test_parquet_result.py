"""What a Parquet file says of its unit."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphkiln_backend.scoring.destinations.base import Committed, Result
from graphkiln_backend.scoring.destinations.parquet import (
    encode_result,
    read_columns,
    read_committed,
)
from graphkiln_backend.scoring.errors import ScoringError

UNIT = "0" * 32


def encoded(errors: list[str | None]) -> io.BytesIO:
    table = pa.table({"id": [str(index) for index in range(len(errors))], "error": pa.array(errors, pa.string())})
    return io.BytesIO(encode_result(Result(unit_id=UNIT, configuration="model", table=table), "attempt"))


@pytest.mark.parametrize("errors", [[], [None, None], [None, "bad", None], ["bad"]])
def test_a_footer_says_how_many_rows_have_an_answer(errors: list[str | None]) -> None:
    metadata = pq.read_metadata(encoded(errors))
    wrong = sum(each is not None for each in errors)
    right = len(errors) - wrong
    expected = Committed(unit_id=UNIT, place="there", configuration="model", scored=right, errors=wrong)
    assert read_committed(UNIT, "there", metadata) == expected
    assert (metadata.metadata or {})[b"graphkiln.attempt"] == b"attempt"


def test_a_footer_of_another_unit_is_refused() -> None:
    with pytest.raises(ScoringError, match="does not hold the result"):
        read_committed("1" * 32, "there", pq.read_metadata(encoded([None])))


def test_only_the_columns_that_are_asked_for_are_read() -> None:
    assert read_columns(encoded([None, "bad"]), ["error"]).to_pydict() == {"error": [None, "bad"]}


def test_what_the_input_said_of_its_schema_is_not_carried_along() -> None:
    table = pa.table({"id": ["x"], "error": pa.array([None], pa.string())}).replace_schema_metadata({"pandas": "large"})
    written = pq.read_metadata(io.BytesIO(encode_result(Result(unit_id=UNIT, configuration="m", table=table), "a")))
    assert b"pandas" not in (written.metadata or {})
