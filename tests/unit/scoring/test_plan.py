"""Plans are written and read in pieces, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring import plan
from graphkiln_backend.scoring.plan import PlanTotals, read_plan, write_plan
from graphkiln_backend.scoring.units import InputRange

RANGES = st.lists(
    st.builds(
        InputRange,
        path=st.just("photos"),
        part=st.text(max_size=30),
        identity=st.text(max_size=5),
        rows=st.integers(1, 5000),
        size_bytes=st.integers(0, 2**40),
    ),
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(ranges=RANGES, units=st.integers(1, 9), size=st.integers(1, 90))
def test_what_was_written_is_read(tmp_path: Path, ranges: list[InputRange], units: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_PIECE_UNITS", units)
        patch.setattr(plan, "_PIECE_BYTES", size)
        totals = write_plan(tmp_path / "plan", iter(ranges), "model")
        assert list(read_plan(tmp_path / "plan")) == [found.unit("model") for found in ranges]
    assert totals == PlanTotals(
        units=len(ranges), rows=sum(one.rows for one in ranges), size_bytes=sum(one.size_bytes for one in ranges)
    )


def test_pieces_are_bounded_in_units_and_in_bytes(tmp_path: Path) -> None:
    small = InputRange(path="a", part="", identity="", rows=1)
    large = InputRange(path="a", part="x" * (1 << 20), identity="", rows=1)
    write_plan(tmp_path / "plan", [*[small] * 2500, *[large] * 12], "model")
    with pq.ParquetFile(tmp_path / "plan") as file:
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    assert groups == [1000, 1000, 505, 5, 2]
