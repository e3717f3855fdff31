"""Each unit is committed exactly once, and only rows that were planted are guilty, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_fleet import FakeFleet, facts, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import (
    Event,
    RowQuarantined,
    Summary,
    UnitFailed,
)
from graphkiln_backend.scoring.outcomes import Attempt, Blame, Cause, Done, Ended, Failed, Ready, UnitReport
from graphkiln_backend.scoring.run import drive
from graphkiln_backend.scoring.schedule import UNITS_PER_WORKER, Schedule
from graphkiln_backend.scoring.units import Unit


def schedule_of(units: Iterator[Unit] | list[Unit], told: list[Event] | None = None) -> Schedule:
    events = [] if told is None else told
    return Schedule(iter(units), events.append, Summary())


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
    assert schedule.summary.scored + schedule.summary.errors == 12 * 40
    assert fleet.most_in_flight <= UNITS_PER_WORKER


def test_the_row_that_ends_its_worker_is_named_with_what_it_does() -> None:
    told: list[Event] = []
    run(FakeFleet(guilty={unit(2).id: {17}}), 5, told)
    (found,) = [each for each in told if isinstance(each, RowQuarantined)]
    assert (found.path, found.position, found.reason) == ("/images/2", 17, "ended its worker with SIGSEGV")


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
    schedule = schedule_of([unit(1)])
    ready(schedule, "a")
    schedule.handle(done("a", begin(schedule, "a"), twin=True), 0.0)
    assert schedule.take("a", 0.0) is None
    assert schedule.is_over
    assert (schedule.summary.scored, schedule.summary.twins) == (40, 1)


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


def test_an_attempt_that_was_being_committed_is_blamed_on_the_store() -> None:
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
