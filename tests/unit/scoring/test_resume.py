"""What a destination holds beside what is planned."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from graphkiln_backend.scoring import plan as module
from graphkiln_backend.scoring.destinations.base import Committed
from graphkiln_backend.scoring.errors import ClaimLost, ScoringError
from graphkiln_backend.scoring.plan import account, read_plan, read_resume_state, settle_stale, write_plan
from graphkiln_backend.scoring.units import InputRange


@dataclass
class Store:
    """A destination that remembers ids and their configurations."""

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


def test_what_is_done_is_told_from_what_is_stale(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 5)
    store = Store({ids[1]: "this", ids[3]: "this", "gone": "this"})
    progress = read_resume_state(store, tmp_path / "plan")  # type: ignore[arg-type]
    assert (progress.done_units, progress.done_rows, progress.stale) == (2, 8, frozenset(["gone"]))


@pytest.mark.parametrize(
    ("configuration", "replace", "refusal"),
    [("this", False, "--replace"), ("other", False, "another model"), ("other", True, "another model")],
)
def test_stale_results_are_refused(configuration: str, replace: bool, refusal: str) -> None:
    store = Store({"gone": configuration})
    with pytest.raises(ScoringError, match=refusal):
        settle_stale(store, frozenset(["gone"]), "this", replace=replace)  # type: ignore[arg-type]
    assert store.units == {"gone": configuration}


def test_stale_results_of_the_same_model_are_replaced_when_asked() -> None:
    store = Store({"gone": "this", "kept": "this"})
    settle_stale(store, frozenset(["gone"]), "this", replace=True)  # type: ignore[arg-type]
    assert store.units == {"kept": "this"}


def test_a_lock_that_was_lost_ends_the_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        if len(store.units) < 7:
            raise ClaimLost("run second took over")

    monkeypatch.setattr(module, "_REMOVED_TOGETHER", 2)
    store = Store({str(number): "this" for number in range(9)})
    with pytest.raises(ClaimLost):
        settle_stale(store, frozenset(store.units), "this", replace=True, check=check)  # type: ignore[arg-type]
    assert sorted(store.units) == [str(number) for number in range(4, 9)]


def test_a_unit_without_a_result_is_told_with_its_reason(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 3)
    store = Store({ids[0]: "this", ids[2]: "this"})
    with pytest.raises(ScoringError, match=r"1 units \(4 rows\) have no result: unit [0-9a-f]+ of /images/1: torn"):
        account(store, tmp_path / "plan", {ids[1]: "torn"})  # type: ignore[arg-type]
    store.units[ids[1]] = "this"
    account(store, tmp_path / "plan", {})  # type: ignore[arg-type]


def test_results_that_nobody_planned_are_told(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 1)
    with pytest.raises(ScoringError, match="1 units have a result but are not planned"):
        account(Store({ids[0]: "this", "x": "this"}), tmp_path / "plan", {})  # type: ignore[arg-type]


@pytest.mark.slow
def test_25000_finished_units_are_seen_in_no_time(tmp_path: Path) -> None:
    ids = make_plan(tmp_path / "plan", 25_000)
    begun = time.monotonic()
    progress = read_resume_state(Store(dict.fromkeys(ids, "this")), tmp_path / "plan")  # type: ignore[arg-type]
    assert progress.done_units == 25_000
    assert time.monotonic() - begun < 10  # the limit of the design; it takes less than a tenth of it
