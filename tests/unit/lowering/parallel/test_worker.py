"""A thread on its own cores."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextvars import ContextVar

from graphkiln_backend.lowering.parallel.building import Worker, results_of

MARK: ContextVar[str] = ContextVar("MARK", default="none")


def test_it_stays_on_its_cores_with_all_that_it_starts() -> None:
    core = min(os.sched_getaffinity(0))
    inherited: list[set[int]] = []

    def start_another() -> set[int]:
        thread = threading.Thread(target=lambda: inherited.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        return os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    with Worker([core]) as worker:
        assert worker.submit(start_another).result() == {core}
    assert inherited == [{core}]
    assert os.sched_getaffinity(0) == before


def test_it_runs_one_after_the_other_in_the_callers_context() -> None:
    order: list[int] = []
    MARK.set("mine")
    with Worker() as worker:
        futures = [worker.submit(order.append, number) for number in range(50)]
        assert worker.submit(MARK.get).result() == "mine"
        results_of(futures)
    assert order == list(range(50))


def test_results_are_in_order_and_nothing_runs_any_more_when_one_failed() -> None:
    first, second = Future[int](), Future[int]()
    returned = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            results_of([first, second])
        except ValueError as error:
            errors.append(error)
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    first.set_exception(ValueError("broken"))
    assert not returned.wait(0.05), "the other one still reads the caller's arrays"
    second.set_result(2)
    assert returned.wait(10)
    thread.join()
    assert [str(error) for error in errors] == ["broken"]
