"""Plans, resume and completeness."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring import plan
from graphkiln_backend.scoring import plan as module
from graphkiln_backend.scoring.destinations.base import Committed
from graphkiln_backend.scoring.errors import LockLost, ScoringError
from graphkiln_backend.scoring.messages import ID_DIGITS, InputRange
from graphkiln_backend.scoring.plan import (
    PlanTotals,
    check_complete,
    read_plan,
    read_resume_state,
    remove_stale,
    write_plan,
)

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
def test_plan_is_read_as_written(tmp_path: Path, ranges: list[InputRange], units: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_ROW_GROUP_UNITS", units)
        patch.setattr(plan, "_ROW_GROUP_BYTES", size)
        totals = write_plan(tmp_path / "plan", iter(ranges), "model")
        assert list(read_plan(tmp_path / "plan")) == [found.unit("model") for found in ranges]
    assert totals == PlanTotals(
        units=len(ranges), rows=sum(one.rows for one in ranges), size_bytes=sum(one.size_bytes for one in ranges)
    )


def test_row_groups_are_limited_in_units_and_bytes(tmp_path: Path) -> None:
    small = InputRange(path="a", part="", identity="", rows=1)
    large = InputRange(path="a", part="x" * (1 << 20), identity="", rows=1)
    write_plan(tmp_path / "plan", [*[small] * 2500, *[large] * 12], "model")
    with pq.ParquetFile(tmp_path / "plan") as file:
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    assert groups == [1000, 1000, 505, 5, 2]


@dataclass
class Store:
    """Destination that keeps configurations by unit id."""

    units: dict[str, str] = field(default_factory=dict)

    def committed_ids(self) -> Iterator[str]:
        return iter(list(self.units))

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        return (Committed(unit_id=each, place=each, configuration=self.units[each]) for each in unit_ids)

    def remove(self, unit_ids: Iterable[str]) -> None:
        for each in unit_ids:
            del self.units[each]


def make_plan(path: Path, count: int) -> list[str]:
    ranges = (InputRange(path=f"/images/{number}", part="[]", identity=f"{number}", rows=4) for number in range(count))
    write_plan(path, ranges, "this")
    return [each.id for each in read_plan(path)]


def test_resume_state_separates_done_from_stale(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 5)
    store = Store({ids[1]: "this", ids[3]: "this", "gone": "this"})
    progress = read_resume_state(store.committed_ids(), tmp_path / "plan")
    assert (progress.done_units, progress.done_rows, progress.stale) == (2, 8, frozenset(["gone"]))


@pytest.mark.parametrize(
    ("configuration", "replace", "refusal"),
    [("this", False, "--replace"), ("other", False, "another model"), ("other", True, "another model")],
)
def test_stale_results_are_refused(configuration: str, replace: bool, refusal: str) -> None:
    store = Store({"gone": configuration})
    with pytest.raises(ScoringError, match=refusal):
        remove_stale(store, frozenset(["gone"]), "this", replace=replace)  # type: ignore[arg-type]
    assert store.units == {"gone": configuration}


def test_stale_results_are_removed_by_replace() -> None:
    store = Store({"gone": "this", "kept": "this"})
    remove_stale(store, frozenset(["gone"]), "this", replace=True)  # type: ignore[arg-type]
    assert store.units == {"kept": "this"}


def test_lost_lock_stops_the_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        if len(store.units) < 7:
            raise LockLost("run second took over")

    monkeypatch.setattr(module, "_REMOVE_UNITS", 2)
    store = Store({str(number): "this" for number in range(9)})
    with pytest.raises(LockLost):
        remove_stale(store, frozenset(store.units), "this", replace=True, check=check)  # type: ignore[arg-type]
    assert sorted(store.units) == [str(number) for number in range(4, 9)]


def test_missing_result_is_reported_with_its_reason(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 3)
    store = Store({ids[0]: "this", ids[2]: "this"})
    with pytest.raises(ScoringError, match=r"1 units \(4 rows\) have no result: unit [0-9a-f]+ of /images/1: torn"):
        check_complete(store, tmp_path / "plan", {ids[1]: "torn"})  # type: ignore[arg-type]
    store.units[ids[1]] = "this"
    check_complete(store, tmp_path / "plan", {})  # type: ignore[arg-type]


def test_unplanned_results_are_reported(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 1)
    with pytest.raises(ScoringError, match="1 units have a result but are not planned"):
        check_complete(Store({ids[0]: "this", "x": "this"}), tmp_path / "plan", {})  # type: ignore[arg-type]


@pytest.mark.slow
def test_resume_of_25000_units_takes_seconds(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 25_000)
    begun = time.monotonic()
    progress = read_resume_state(ids, tmp_path / "plan")
    assert progress.done_units == 25_000
    assert time.monotonic() - begun < 10


FOUND = InputRange(path="photos", part='["a.jpg"]', identity="1", rows=1, size_bytes=7)


def test_unit_id_is_stable() -> None:
    unit = FOUND.unit("model")
    assert unit == FOUND.unit("model")
    assert len(unit.id) == ID_DIGITS
    assert (unit.path, unit.part, unit.rows, unit.size_bytes) == ("photos", '["a.jpg"]', 1, 7)


def test_unit_id_depends_on_identity_and_configuration() -> None:
    others = [replace(FOUND, **{name: f"other {name}"}) for name in ("path", "identity")]
    ids = {unit.id for unit in [FOUND.unit("model"), FOUND.unit("other"), *(one.unit("model") for one in others)]}
    assert len(ids) == 4


def test_unit_id_does_not_depend_on_the_position() -> None:
    assert replace(FOUND, part="elsewhere").unit("model").id == FOUND.unit("model").id
