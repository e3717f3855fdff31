"""Number of restarts of a server, and their metric."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graphkiln_backend.server.supervisor import MAX_RESTARTS, POLL_S, SERVED_S, WATCH_S, Pace, RestartBudget
from graphkiln_backend.server.watchdog import Cause, Fault

FAULT = Fault(cause=Cause.SERVER_DIED, what="it died")


def test_the_first_restart_is_immediate_each_further_one_waits_twice_as_long_and_then_it_is_given_up() -> None:
    budget = RestartBudget()
    delays = [budget.spend(FAULT, served_s=0.0) for _ in range(MAX_RESTARTS + 1)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, None]


def test_a_server_that_serves_in_between_is_restarted_for_ever() -> None:
    budget = RestartBudget()
    assert [budget.spend(FAULT, served_s=SERVED_S) for _ in range(100)] == [0.0] * 100


def test_long_service_pays_for_all_faults_before_but_saves_nothing_up() -> None:
    budget = RestartBudget()
    for _ in range(MAX_RESTARTS):
        budget.spend(FAULT, served_s=0.0)
    assert budget.spend(FAULT, served_s=1000.0) == 0.0
    assert [budget.spend(FAULT, served_s=0.0) for _ in range(MAX_RESTARTS)][-1] is None


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_little_service_pays_a_little(share: float) -> None:
    budget = RestartBudget()
    spent = 0
    while budget.spend(FAULT, served_s=share * SERVED_S) is not None:
        spent += 1
    assert MAX_RESTARTS <= spent < 100


def test_restarts_are_told_by_cause() -> None:
    budget = RestartBudget()
    budget.spend(FAULT, served_s=0.0)
    budget.spend(Fault(cause=Cause.INSTANCE_HUNG, what="it hung"), served_s=0.0)
    budget.count(Cause.LOAD_DEADLINE)
    assert budget.counts() == dict.fromkeys(Cause, 0) | {
        "server_died": 1,
        "instance_hung": 1,
        "load_deadline": 1,
    }


# The time between two looks at the processes.


class Clock:
    """Processor time under control; waiting takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waited: list[float] = []
        monkeypatch.setattr("time.thread_time", lambda: self.now)

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        assert processes == [7]
        self.waited.append(timeout_s)


def test_looking_takes_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace()
    for looked_s, live in ((0.001, False), (0.01, False), (0.001, True), (0.04, True), (30, True)):
        clock.now += looked_s
        pace.wait(clock, [7], live=live)  # type: ignore[arg-type]
    assert clock.waited == [POLL_S, pytest.approx(0.19), WATCH_S, pytest.approx(0.76), 1.0]
