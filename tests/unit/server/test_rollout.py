"""The thread that looks after the models while a server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from graphkiln_backend.server import rollout as module
from graphkiln_backend.server.rollout import AdmissionStopped, Rollout


class Steps:
    """A keeper that does what it is given, one after the other; the first step is to settle."""

    ticks = True

    def __init__(self, *steps: Callable[[], float | None]) -> None:
        self._steps = list(steps)
        self.done = threading.Event()

    def is_settled(self) -> bool:
        return False

    def settle(self) -> None:
        self.tick()

    def tick(self) -> float | None:
        if not self._steps:
            self.done.set()
            return None
        return self._steps.pop(0)()


def fail() -> float | None:
    raise ConnectionError("the server has ended")


def stop() -> float | None:
    raise AdmissionStopped


def test_it_settles_reports_and_ticks() -> None:
    settled: list[str] = []
    keeper = Steps(lambda: settled.append("settle"), lambda: settled.append("tick") or 0.0)
    rollout = Rollout()
    rollout.begin(keeper, lambda: settled.append("report"))
    assert keeper.done.wait(10)
    rollout.end()
    assert settled == ["settle", "report", "tick"]


def test_an_error_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(module, "_SOON_S", 0.01)
    keeper = Steps(fail, fail, lambda: None, fail)
    reported = threading.Event()
    rollout = Rollout()
    rollout.begin(keeper, reported.set)
    assert reported.wait(10)
    rollout.end()
    assert logged
    assert set(logged) == {"cannot look after the models just now: the server has ended"}


def test_an_error_that_nobody_foresaw_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SOON_S", 0.01)

    def divide() -> float | None:
        raise ZeroDivisionError("by a graph")

    keeper = Steps(lambda: None, divide, divide)
    rollout = Rollout()
    rollout.begin(keeper, lambda: None)
    assert keeper.done.wait(10)
    rollout.end()
    first, second = caplog.records
    assert first.message == "cannot look after the models just now: ZeroDivisionError: by a graph"
    assert first.exc_info
    assert not second.exc_info, "its traceback is told once"


def test_an_error_after_the_halt_is_not_told(logged: list[str]) -> None:
    rollout = Rollout()

    def halt() -> float | None:
        rollout.halt()
        raise ConnectionError

    reported: list[bool] = []
    rollout.begin(Steps(halt), lambda: reported.append(True))
    rollout.end()
    assert (logged, reported) == ([], [])
    assert rollout.stopped()


def test_it_can_begin_again() -> None:
    rollout = Rollout()
    for _ in range(2):
        keeper = Steps(lambda: 0.0, lambda: 0.0)
        rollout.begin(keeper, lambda: None)
        assert keeper.done.wait(10)
        rollout.end()


def test_a_stopped_admission_ends_it() -> None:
    keeper = Steps(lambda: None, stop, lambda: 0.0)
    rollout = Rollout()
    rollout.begin(keeper, lambda: None)
    assert rollout._thread is not None
    rollout._thread.join(10)
    assert not rollout._thread.is_alive()
    rollout.end()


def test_a_store_that_does_not_answer_delays_no_end(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(module, "_END_S", 0.01)
    asked, answered = threading.Event(), threading.Event()
    later: list[str] = []

    def hang() -> float | None:
        asked.set()
        answered.wait(60)
        return 0.0

    rollout = Rollout()
    rollout.begin(Steps(lambda: None, hang, lambda: later.append("looked again")), lambda: None)
    assert asked.wait(10)
    hanging = rollout._thread
    rollout.end()
    assert logged == ["a model store has not answered for 0.01 s: going on without waiting for it"]
    next_one = Steps(lambda: None)
    rollout.begin(next_one, lambda: None)  # of the next server
    assert next_one.done.wait(10)
    answered.set()
    assert hanging is not None
    hanging.join(10)
    assert not hanging.is_alive()
    assert later == [], "nobody waits for what it finds"
    monkeypatch.setattr(module, "_END_S", 10.0)
    rollout.end()


def test_the_end_without_a_beginning() -> None:
    Rollout().end()


class Settled(Steps):
    """A keeper of a server that is in order."""

    ticks = False

    def is_settled(self) -> bool:
        return True


def test_where_all_is_in_order_nothing_is_started() -> None:
    reported: list[threading.Thread] = []
    rollout = Rollout()
    rollout.begin(Settled(fail), lambda: reported.append(threading.current_thread()))
    assert reported == [threading.current_thread()]
    assert rollout._thread is None


def test_where_all_is_in_order_it_may_tick() -> None:
    keeper = Settled(lambda: 0.0)
    keeper.ticks = True
    reported: list[bool] = []
    rollout = Rollout()
    rollout.begin(keeper, lambda: reported.append(True))
    assert keeper.done.wait(10)
    rollout.end()
    assert reported == [True]


def test_a_server_that_tells_nothing_is_reported_as_it_is(logged: list[str]) -> None:
    class Silent(Settled):
        def is_settled(self) -> bool:
            raise ConnectionError("status 403")

    reported: list[bool] = []
    Rollout().begin(Silent(), lambda: reported.append(True))
    assert reported == [True]
    assert logged == ["cannot look after the models: status 403"]
