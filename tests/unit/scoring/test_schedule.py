"""Each unit is committed exactly once, and only planted rows are quarantined, for any sequence of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_fleet import FakeFleet, facts, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.driver import drive
from graphkiln_backend.scoring.errors import LockLost, ScoringError
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Event,
    Failed,
    RowQuarantined,
    Survived,
    Unit,
    UnitCommitted,
    UnitFailed,
    UnitReport,
    WorkerReady,
)
from graphkiln_backend.scoring.schedule import (
    FIRST_HANG_TIMEOUT_S,
    MAX_DELAY_S,
    MAX_FAILED_UNITS,
    MAX_STORE_FAILURES,
    MIN_HANG_TIMEOUT_S,
    UNITS_PER_WORKER,
    RowSearch,
    Schedule,
)


def schedule_of(units: Iterator[Unit] | list[Unit], *workers: str, events: list[Event] | None = None) -> Schedule:
    """A schedule whose workers are ready."""
    schedule = Schedule(iter(units), ([] if events is None else events).append)
    for worker in workers:
        schedule.handle(WorkerReady(worker=worker, facts=facts()), 0.0)
    return schedule


def start(schedule: Schedule, worker: str, now: float = 0.0) -> Attempt:
    attempt = schedule.take(worker, now)
    assert attempt is not None
    return attempt


def finish(schedule: Schedule, attempt: Attempt, *, worker: str = "a", now: float = 0.0, seconds: float = 2.0) -> None:
    report = UnitReport(unit_id=attempt.unit.id, rows=attempt.unit.rows, errors=0, seconds=seconds)
    schedule.handle(Done(worker=worker, attempt=attempt.number, report=report), now)


def fail(schedule: Schedule, cause: Cause, reason: str, now: float = 0.0) -> Attempt:
    """Start an attempt on worker a and let it fail."""
    attempt = start(schedule, "a", now)
    schedule.handle(Failed(worker="a", attempt=attempt.number, cause=cause, reason=reason), now)
    return attempt


def replace_worker(schedule: Schedule, blame: Blame, committing: frozenset[int] = frozenset()) -> None:
    """End worker a and let another one of this name be ready."""
    schedule.handle(Ended(worker="a", blame=blame, reason="hung for 60 s", committing=committing), 0.0)
    schedule.handle(WorkerReady(worker="a", facts=facts()), 0.0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    planted=st.dictionaries(st.integers(0, 11), st.sets(st.integers(0, 39), max_size=3), max_size=4),
    faults=st.sampled_from([0.0, 0.05, 0.2]),
    size=st.integers(1, 5),
)
def test_each_unit_is_committed_once_and_planted_rows_are_quarantined(
    seed: int, planted: dict[int, set[int]], faults: float, size: int
) -> None:
    poison = {unit(number).id: rows for number, rows in planted.items()}
    fleet = FakeFleet(size=size, poison=poison, faults=faults, failures=0.02, seed=seed)
    events: list[Event] = []
    schedule = schedule_of([unit(number) for number in range(12)], events=events)
    drive(schedule, fleet, lambda: None, fleet.clock)
    assert fleet.commits == {unit(number).id: 1 for number in range(12)}
    assert {each: rows for each, rows in fleet.quarantined.items() if rows} == {k: v for k, v in poison.items() if v}
    assert schedule.failed == []
    found = [(each.unit_id, each.position) for each in events if isinstance(each, RowQuarantined)]
    assert len(found) == len(set(found))
    assert sum(each.report.rows for each in events if isinstance(each, UnitCommitted)) == 12 * 40
    assert fleet.most_in_flight <= UNITS_PER_WORKER


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 5))
def test_no_row_is_blamed_for_a_node_that_ends_all_of_its_workers(seed: int, size: int) -> None:
    fleet = FakeFleet(size=size, nodes=2, broken_node="node-1", seed=seed)
    events: list[Event] = []
    schedule = schedule_of([unit(number) for number in range(12)], events=events)
    drive(schedule, fleet, lambda: None, fleet.clock)
    assert fleet.commits == {unit(number).id: 1 for number in range(12)}
    assert not any(isinstance(each, RowQuarantined | UnitFailed) for each in events)


def test_suspect_is_computed_alone() -> None:
    schedule = schedule_of([unit(number) for number in range(9)], "a", "b")
    suspects = [start(schedule, "a").unit, start(schedule, "a").unit]
    elsewhere = start(schedule, "b")
    schedule.handle(Ended(worker="a", blame=Blame.ROWS, reason="hung for 60 s"), 1.0)
    assert schedule.take("b", 1.0) is None
    finish(schedule, elsewhere, worker="b", now=2.0)
    assert start(schedule, "b", 2.0).unit in suspects
    assert schedule.take("b", 2.0) is None


def test_suspect_waits_after_a_store_failure() -> None:
    schedule = schedule_of([unit(1)], "a")
    start(schedule, "a")
    replace_worker(schedule, Blame.ROWS)
    fail(schedule, Cause.STORE, "busy", 2.0)
    assert schedule.take("a", 2.5) is None
    start(schedule, "a", 2.0 + MAX_DELAY_S)


def test_lost_nodes_make_no_suspects() -> None:
    schedule = schedule_of([unit(1), unit(2)], "a")
    for _ in range(10):
        assert [start(schedule, "a").probe, start(schedule, "a").probe] == [None, None]
        replace_worker(schedule, Blame.NODE)


def test_row_that_fails_without_ending_its_worker_is_quarantined() -> None:
    events: list[Event] = []
    schedule = schedule_of([unit(1, rows=4)], "a", events=events)
    while not any(isinstance(each, RowQuarantined) for each in events):
        attempt = start(schedule, "a")
        rows = range(4)[attempt.probe.start : attempt.probe.stop] if attempt.probe else range(4)
        if 2 in rows:
            failed = Failed(worker="a", attempt=attempt.number, cause=Cause.ROWS, reason="raised MemoryError: ")
            schedule.handle(failed, 0.0)
        else:
            schedule.handle(Survived(worker="a", attempt=attempt.number), 0.0)
    assert start(schedule, "a").quarantined == {2: "its worker raised MemoryError: "}


def test_unit_without_a_poison_row_fails_and_the_run_continues() -> None:
    schedule = schedule_of([unit(1, rows=2), unit(2)], "a")
    while not schedule.failed:
        attempt = start(schedule, "a")
        if attempt.unit == unit(2):
            finish(schedule, attempt)
        elif attempt.probe:
            schedule.handle(Survived(worker="a", attempt=attempt.number), 0.0)
        else:
            replace_worker(schedule, Blame.ROWS)
    assert schedule.failed[0].reason == "its worker hung for 60 s, and no row causes that alone"


@pytest.mark.parametrize(
    ("cause", "attempts"), [(Cause.CHANGED, 1), (Cause.REFUSED, 1), (Cause.UNREADABLE, 3), (Cause.SOURCE, 8)]
)
def test_unit_fails_after_some_attempts(cause: Cause, attempts: int) -> None:
    """In the last attempt of an unavailable source, rows that cannot be read are errors."""
    events: list[Event] = []
    schedule = schedule_of([unit(1)], "a", events=events)
    made = [fail(schedule, cause, "torn", 100.0 * number) for number in range(attempts)]
    assert schedule.take("a", 900.0) is None
    assert schedule.is_over
    assert events[-1] == UnitFailed(unit_id=unit(1).id, path="/images/1", reason="torn")
    assert [each.outages_are_errors for each in made] == [*[False] * (attempts - 1), cause is Cause.SOURCE]


def test_end_during_a_commit_blames_no_row() -> None:
    schedule = schedule_of([unit(1)], "a")
    replace_worker(schedule, Blame.ROWS, committing=frozenset([start(schedule, "a").number]))
    assert schedule.take("a", 0.0) is None
    assert start(schedule, "a", 5.0).probe is None


def test_units_are_read_from_the_plan_as_needed() -> None:
    taken = 0

    def units() -> Iterator[Unit]:
        nonlocal taken
        for number in range(50):
            taken += 1
            yield unit(number)

    schedule = schedule_of(units(), "a")
    for number in range(10):
        finish(schedule, start(schedule, "a"))
        assert taken == number + 1


@given(st.data())
def test_search_finds_a_poison_row(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    poison = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    search, probes = RowSearch(rows), 0
    while not search.is_over:
        probes += 1
        if poison & set(range(search.probe.start, search.probe.stop)):
            search.ended()
        else:
            search.survived()
    assert probes <= rows.bit_length() + 2
    assert search.poison in poison


def test_hang_timeout_follows_the_slowest_of_the_last_units() -> None:
    schedule = schedule_of([unit(number) for number in range(60)], "a")
    expected = ((1.0, MIN_HANG_TIMEOUT_S), (100.0, 300.0), *[(1.0, 300.0)] * 49, (1.0, MIN_HANG_TIMEOUT_S))
    for seconds, timeout_s in expected:
        finish(schedule, start(schedule, "a"), seconds=seconds)
        assert schedule.hang_timeout_s("a") == timeout_s


def test_first_hang_timeout_of_each_worker_is_long() -> None:
    schedule = schedule_of([unit(number) for number in range(9)], "a", "b")
    finish(schedule, start(schedule, "a"))
    assert schedule.hang_timeout_s("a") == MIN_HANG_TIMEOUT_S
    assert schedule.hang_timeout_s("b") == FIRST_HANG_TIMEOUT_S
    replace_worker(schedule, Blame.NODE)
    assert schedule.hang_timeout_s("a") == FIRST_HANG_TIMEOUT_S


def test_search_for_a_row_that_hangs_does_not_wait_as_for_a_first_batch() -> None:
    schedule = schedule_of([unit(number) for number in range(9)], "a")
    finish(schedule, start(schedule, "a"))
    start(schedule, "a")
    replace_worker(schedule, Blame.ROWS)
    start(schedule, "a")
    assert schedule.hang_timeout_s("a") == MIN_HANG_TIMEOUT_S


def test_units_that_fail_in_a_row_end_the_run() -> None:
    schedule = schedule_of([unit(number) for number in range(9)], "a")
    for _ in range(MAX_FAILED_UNITS - 1):
        fail(schedule, Cause.REFUSED, "torn")
    with pytest.raises(ScoringError, match=r"5 units in a row failed.*torn.*same command"):
        fail(schedule, Cause.REFUSED, "torn")


def test_store_that_fails_in_a_row_ends_the_run() -> None:
    schedule = schedule_of([unit(number) for number in range(9)], "a")
    for now in range(0, 900, 100):
        for later in range(MAX_STORE_FAILURES - 1):
            fail(schedule, Cause.STORE, "busy", now + 10.0 * later)
        finish(schedule, start(schedule, "a", now + 90.0))
    schedule = schedule_of([unit(number) for number in range(9)], "a")
    for number in range(MAX_STORE_FAILURES - 1):
        fail(schedule, Cause.STORE, "the disk is full", 100.0 * number)
    with pytest.raises(ScoringError, match=r"the disk is full.*same command"):
        fail(schedule, Cause.STORE, "the disk is full", 900.0)


def test_lost_lock_ends_the_run_at_once() -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > 5:
            raise LockLost("another run took over")

    fleet = FakeFleet()
    schedule = schedule_of([unit(number) for number in range(100)])
    with pytest.raises(LockLost):
        drive(schedule, fleet, check, fleet.clock)
    assert sum(fleet.commits.values()) < 10
