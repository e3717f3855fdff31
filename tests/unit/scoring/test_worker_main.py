"""How a worker's process explains what went wrong."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
from fake_fleet import facts, unit

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.scoring.errors import (
    InputChanged,
    ScoringError,
    SourceUnavailable,
    StoreError,
    UnitUnreadable,
    WorkerUnfit,
)
from graphkiln_backend.scoring.outcomes import Attempt, Blame, Cause, Ended, Failed, Progress, Ready
from graphkiln_backend.scoring.worker_main import Assignment, Serving, cause_of


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (InputChanged("it changed"), Cause.CHANGED),
        (SourceUnavailable("no network"), Cause.SOURCE),
        (UnitUnreadable("torn"), Cause.UNREADABLE),
        (StoreError("the disk is full"), Cause.STORE),
        (ScoringError("other columns"), Cause.REFUSED),
        (ExecutionError("out of range"), Cause.ROWS),
        (MemoryError(), Cause.ROWS),
    ],
)
def test_each_error_has_its_cause(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause


class Broken:
    """A worker that fails, and may no longer compute what it did."""

    facts = facts()

    def __init__(self, error: BaseException, *, unfit: bool) -> None:
        self._error, self._unfit = error, unfit

    def score(self, *_: object) -> None:
        raise self._error

    def prove(self) -> None:
        if self._unfit:
            raise WorkerUnfit("it computes wrongly")


def answer(worker: Broken) -> object:
    ours, theirs = Pipe()
    progress = Progress.create()
    serving = Serving("worker-1", worker, progress, theirs)  # type: ignore[arg-type]
    ours.send(Assignment(number=3, attempt=Attempt(unit=unit(1))))
    try:
        serving._serve(ours_received := theirs.recv())
        assert ours_received.number == 3
        return ours.recv()
    finally:
        ours.close()
        theirs.close()


def test_a_row_is_to_blame_only_when_the_session_is_sound() -> None:
    sound = answer(Broken(ExecutionError("out of range"), unfit=False))
    reason = "raised ExecutionError: out of range"
    assert sound == Failed(worker="worker-1", attempt=3, cause=Cause.ROWS, reason=reason)
    unfit = answer(Broken(ExecutionError("device lost"), unfit=True))
    assert unfit == Ended(worker="worker-1", blame=Blame.WORKER, reason="it computes wrongly")


def test_what_is_no_exception_is_told_too_and_is_no_hang() -> None:
    class PanicException(BaseException):
        """As what is written in Rust raises it."""

    found = answer(Broken(PanicException("index out of bounds"), unfit=False))
    reason = "raised PanicException: index out of bounds"
    assert found == Failed(worker="worker-1", attempt=3, cause=Cause.ROWS, reason=reason)


def test_a_store_that_fails_asks_for_no_proof() -> None:
    found = answer(Broken(StoreError("the disk is full"), unfit=True))
    assert found == Failed(worker="worker-1", attempt=3, cause=Cause.STORE, reason="the disk is full")


def test_serving_ends_when_nobody_sends() -> None:
    ours, theirs = Pipe()
    serving = Serving("worker-1", Broken(MemoryError(), unfit=False), Progress.create(), theirs)  # type: ignore[arg-type]
    ours.close()
    with pytest.raises(SystemExit):
        _run(serving)


def _run(serving: Serving) -> None:
    import graphkiln_backend.scoring.worker_main as module

    def leave(status: int) -> None:
        raise SystemExit(status)

    original, module.os._exit = module.os._exit, leave  # type: ignore[assignment]
    try:
        serving.run()
    finally:
        module.os._exit = original


def test_it_says_that_it_is_ready_first() -> None:
    ours, theirs = Pipe()
    serving = Serving("worker-1", Broken(MemoryError(), unfit=False), Progress.create(), theirs)  # type: ignore[arg-type]
    serving.send(Ready(worker="worker-1", facts=facts()))
    assert ours.recv() == Ready(worker="worker-1", facts=facts())
