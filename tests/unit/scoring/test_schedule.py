"""Each unit is committed exactly once, and only rows that were planted are guilty, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_fleet import FakeFleet, facts, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.driver import drive
from graphkiln_backend.scoring.errors import ClaimLost, ScoringError
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Event,
    Failed,
    Ready,
    RowQuarantined,
    UnitCommitted,
    UnitFailed,
    UnitReport,
)
from graphkiln_backend.scoring.schedule import (
    FIRST_S,
    FLOOR_S,
    LONGEST_WAIT_S,
    MOST_FAILED_UNITS,
    MOST_STORE_FAILURES,
    UNITS_PER_WORKER,
    RowSearch,
    Schedule,
)
from graphkiln_backend.scoring.units import Unit


def schedule_of(units: Iterator[Unit] | list[Unit], told: list[Event] | None = None) -> Schedule:
    events = [] if told is None else told
    return Schedule(iter(units), events.append)


def run(fleet: FakeFleet, count: int, told: list[Event] | None = None) -> Schedule:
    schedule = schedule_of([unit(number) for number in range(count)], told)
    drive(schedule, fleet, lambda: None, fleet.clock)
    return schedule


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    planted=st.dictionaries(st.integers(0, 11), st.sets(st.integers(0, 39), max_size=3), max_size=4),
    faults=st.sampled_from([0.0, 0.05, 0.2]),
    size=st.integers(1, 5),
)
def test_each_unit_is_committed_once_and_the_guilty_rows_are_those_planted(
    seed: int, planted: dict[int, set[int]], faults: float, size: int
) -> None:
    guilty = {unit(number).id: rows for number, rows in planted.items()}
    fleet = FakeFleet(size=size, guilty=guilty, faults=faults, failures=0.02, seed=seed)
    told: list[Event] = []
    schedule = run(fleet, 12, told)
    assert fleet.commits == {unit(number).id: 1 for number in range(12)}
    assert {each: rows for each, rows in fleet.quarantined.items() if rows} == {k: v for k, v in guilty.items() if v}
    assert schedule.failed == []
    found = [(each.unit_id, each.position) for each in told if isinstance(each, RowQuarantined)]
    assert len(found) == len(set(found)), "each guilty row is told of once"
    assert sum(each.report.rows for each in told if isinstance(each, UnitCommitted)) == 12 * 40
    assert fleet.most_in_flight <= UNITS_PER_WORKER


def ready(schedule: Schedule, *workers: str) -> None:
    for worker in workers:
        schedule.handle(Ready(worker=worker, facts=facts()), 0.0)


def begin(schedule: Schedule, worker: str, now: float = 0.0) -> tuple[int, Attempt]:
    taken = schedule.take(worker, now)
    assert taken is not None
    return taken


def done(worker: str, taken: tuple[int, Attempt], *, twin: bool = False) -> Done:
    number, attempt = taken
    report = UnitReport(unit_id=attempt.unit.id, rows=attempt.unit.rows, errors=0, seconds=2.0, twin=twin)
    return Done(worker=worker, attempt=number, report=report)


def test_a_suspect_shares_its_worker_with_nothing() -> None:
    schedule = schedule_of([unit(number) for number in range(9)])
    ready(schedule, "a", "b")
    first, second = begin(schedule, "a"), begin(schedule, "a")
    elsewhere = begin(schedule, "b")
    schedule.handle(Ended(worker="a", blame=Blame.ROWS, reason="hung for 60 s"), 1.0)
    assert schedule.take("b", 1.0) is None, "it is kept free for the suspects"
    schedule.handle(done("b", elsewhere), 2.0)
    alone = begin(schedule, "b", 2.0)
    assert alone[1].unit in (first[1].unit, second[1].unit)
    assert schedule.take("b", 2.0) is None


def test_a_suspect_waits_for_a_store_that_fails_like_any_other() -> None:
    schedule = schedule_of([unit(1)])
    ready(schedule, "a")
    begin(schedule, "a")
    schedule.handle(Ended(worker="a", blame=Blame.ROWS, reason="hung for 60 s"), 1.0)
    ready(schedule, "a")
    number, _ = begin(schedule, "a", 1.0)
    schedule.handle(Failed(worker="a", attempt=number, cause=Cause.STORE, reason="busy"), 2.0)
    assert schedule.take("a", 2.5) is None
    begin(schedule, "a", 2.0 + LONGEST_WAIT_S)


def test_a_node_that_goes_away_makes_no_suspects() -> None:
    schedule = schedule_of([unit(1), unit(2)])
    ready(schedule, "a", "b")
    begin(schedule, "a"), begin(schedule, "a")
    for _ in range(10):
        schedule.handle(Ended(worker="a", blame=Blame.NODE, reason="its node is gone"), 1.0)
        ready(schedule, "a")
        begin(schedule, "a", 1.0), begin(schedule, "a", 1.0)
    assert schedule.take("a", 1.0) is None
    schedule.handle(Ended(worker="a", blame=Blame.NODE, reason="its node is gone"), 1.0)
    begin(schedule, "b", 1.0), begin(schedule, "b", 1.0)


def test_a_row_that_fails_with_its_worker_alive_is_searched_for_as_well() -> None:
    told: list[Event] = []
    schedule = schedule_of([unit(1, rows=4)], told)
    ready(schedule, "a")
    while not any(isinstance(each, RowQuarantined) for each in told):
        number, attempt = begin(schedule, "a")
        rows = range(4)[attempt.probe.start : attempt.probe.stop] if attempt.probe else range(4)
        if 2 in rows:
            schedule.handle(Failed(worker="a", attempt=number, cause=Cause.ROWS, reason="raised MemoryError: "), 0.0)
        else:
            schedule.handle(Done(worker="a", attempt=number, report=None), 0.0)
    assert begin(schedule, "a")[1].quarantined == {2: "raised MemoryError: "}


def test_a_unit_whose_rows_do_nothing_alone_fails_and_the_run_goes_on() -> None:
    schedule = schedule_of([unit(1, rows=2), unit(2)])
    ready(schedule, "a")
    while not schedule.failed:
        number, attempt = begin(schedule, "a")
        if attempt.unit == unit(2):
            schedule.handle(done("a", (number, attempt)), 0.0)
        elif attempt.probe:
            schedule.handle(Done(worker="a", attempt=number, report=None), 0.0)
        else:
            schedule.handle(Ended(worker="a", blame=Blame.ROWS, reason="hung for 60 s"), 0.0)
            ready(schedule, "a")
    assert schedule.failed[0].reason == "hung for 60 s, and no row of it does so alone"


def test_a_result_that_stood_there_already_counts() -> None:
    told: list[Event] = []
    schedule = schedule_of([unit(1)], told)
    ready(schedule, "a")
    schedule.handle(done("a", begin(schedule, "a"), twin=True), 0.0)
    assert schedule.take("a", 0.0) is None
    assert schedule.is_over
    assert isinstance(told[-1], UnitCommitted)
    assert (told[-1].report.rows, told[-1].report.twin) == (40, True)


def test_a_store_that_fails_again_and_again_ends_the_run() -> None:
    schedule = schedule_of([unit(number) for number in range(9)])
    ready(schedule, "a")

    def fail(now: float) -> None:
        taken = schedule.take("a", now)
        if taken:
            failed = Failed(worker="a", attempt=taken[0], cause=Cause.STORE, reason="the disk is full")
            schedule.handle(failed, now)

    with pytest.raises(ScoringError, match=r"the destination cannot be written: the disk is full.*same command"):
        list(map(fail, range(100)))


def test_input_that_changes_leaves_its_unit_to_the_next_run() -> None:
    told: list[Event] = []
    schedule = schedule_of([unit(1)], told)
    ready(schedule, "a")
    number, _ = begin(schedule, "a")
    schedule.handle(Failed(worker="a", attempt=number, cause=Cause.CHANGED, reason="it changed"), 0.0)
    assert schedule.take("a", 0.0) is None
    assert schedule.is_over
    assert told[-1] == UnitFailed(unit_id=unit(1).id, path="/images/1", reason="it changed")


def test_a_unit_that_cannot_be_read_fails_after_some_attempts() -> None:
    told: list[Event] = []
    schedule = schedule_of([unit(1)], told)
    ready(schedule, "a")
    for now in (0.0, 10.0, 20.0):
        number, _ = begin(schedule, "a", now)
        schedule.handle(Failed(worker="a", attempt=number, cause=Cause.UNREADABLE, reason="torn"), now)
    assert schedule.take("a", 90.0) is None
    assert schedule.is_over
    assert told[-1] == UnitFailed(unit_id=unit(1).id, path="/images/1", reason="torn")


def test_rows_that_cannot_be_read_stop_their_unit_some_times_and_are_errors_then() -> None:
    told: list[Event] = []
    schedule = schedule_of([unit(1)], told)
    ready(schedule, "a")
    lenient = []
    for now in range(0, 800, 100):
        number, attempt = begin(schedule, "a", float(now))
        lenient.append(attempt.outages_are_errors)
        schedule.handle(Failed(worker="a", attempt=number, cause=Cause.SOURCE, reason="no disk"), float(now))
    assert lenient == [False] * 7 + [True]
    assert schedule.take("a", 900.0) is None
    assert schedule.is_over
    assert told[-1] == UnitFailed(unit_id=unit(1).id, path="/images/1", reason="no disk")


def test_a_worker_that_ends_while_it_commits_blames_no_row() -> None:
    schedule = schedule_of([unit(1)])
    ready(schedule, "a")
    number, attempt = begin(schedule, "a")
    committing = frozenset([number])
    schedule.handle(Ended(worker="a", blame=Blame.ROWS, reason="hung for 60 s", committing=committing), 0.0)
    ready(schedule, "b")
    assert schedule.take("b", 0.0) is None, "the store is given some time"
    assert begin(schedule, "b", 5.0)[1].probe is None
    assert attempt.unit == unit(1)


def test_memory_holds_what_is_worked_on() -> None:
    taken = 0

    def units() -> Iterator[Unit]:
        nonlocal taken
        for number in range(50):
            taken += 1
            yield unit(number)

    schedule = schedule_of(units())
    ready(schedule, "a")
    for number in range(10):
        schedule.handle(done("a", begin(schedule, "a")), 0.0)
        assert taken == number + 1


def run_search(search: RowSearch, guilty: set[int]) -> int:
    """Probes until the search is over; how often."""
    probes = 0
    while not search.is_over:
        probes += 1
        span = search.probe
        if guilty & set(range(span.start, span.stop)):
            search.ended()
        else:
            search.survived()
    return probes


@given(st.data())
def test_a_search_finds_one_of_the_guilty_rows(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    guilty = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    search = RowSearch(rows)
    assert run_search(search, guilty) <= rows.bit_length() + 2
    assert search.guilty in guilty


def test_patience_follows_the_slowest_of_the_last_units() -> None:
    schedule = schedule_of([unit(number) for number in range(60)])
    ready(schedule, "a")
    assert schedule.patience_s == FIRST_S
    for seconds, patience_s in ((1.0, FLOOR_S), (100.0, 300.0), *[(1.0, 300.0)] * 49, (1.0, FLOOR_S)):
        number, attempt = begin(schedule, "a")
        report = UnitReport(unit_id=attempt.unit.id, rows=40, errors=0, seconds=seconds)
        schedule.handle(Done(worker="a", attempt=number, report=report), 0.0)
        assert schedule.patience_s == patience_s


def test_units_that_fail_one_after_the_other_end_the_run() -> None:
    schedule = schedule_of([unit(number) for number in range(9)])
    ready(schedule, "a")

    def fail() -> None:
        number, _ = begin(schedule, "a")
        schedule.handle(Failed(worker="a", attempt=number, cause=Cause.REFUSED, reason="torn"), 0.0)

    for _ in range(MOST_FAILED_UNITS - 1):
        fail()
    with pytest.raises(ScoringError, match=r"5 units in a row failed.*torn.*same command"):
        fail()


def test_a_store_may_fail_for_a_while() -> None:
    schedule = schedule_of([unit(number) for number in range(9)])
    ready(schedule, "a")
    for now in range(0, 900, 100):
        for later in range(MOST_STORE_FAILURES - 1):
            number, _ = begin(schedule, "a", now + 10.0 * later)
            schedule.handle(Failed(worker="a", attempt=number, cause=Cause.STORE, reason="busy"), float(now))
        schedule.handle(done("a", begin(schedule, "a", now + 90.0)), float(now))


def test_a_run_that_lost_its_lock_stops_at_once() -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > 5:
            raise ClaimLost("another run took over")

    fleet = FakeFleet()
    schedule = schedule_of([unit(number) for number in range(100)])
    with pytest.raises(ClaimLost):
        drive(schedule, fleet, check, fleet.clock)
    assert sum(fleet.commits.values()) < 10
