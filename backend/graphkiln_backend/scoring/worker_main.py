"""The process of a worker: computes what it is sent over a connection that it inherits, until that is closed.

Started by `worker_process` as `python -m graphkiln_backend.scoring.worker_main`: whatever ends it (a decoder that
crashes, memory that is gone) ends nothing else, and how it ended is seen by who started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.errors import (
    InputChanged,
    ScoringError,
    SourceUnavailable,
    StoreError,
    UnitUnreadable,
    WorkerUnfit,
)
from graphkiln_backend.scoring.outcomes import Attempt, Blame, Cause, Done, Ended, Failed, Outcome, Progress, Ready
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.schedule import UNITS_PER_WORKER
from graphkiln_backend.scoring.worker import Worker

_PR_SET_PDEATHSIG = 1  # source: prctl(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the process is sent.

    Attributes:
        number: Of the attempt.
        attempt: The attempt.
    """

    number: int
    attempt: Attempt


class Serving:
    """Answers assignments on threads of its own.

    Args:
        name: Of the worker.
        worker: Computes.
        progress: Where it tells how far it is.
        connection: Where outcomes go.
    """

    def __init__(self, name: str, worker: Worker, progress: Progress, connection: Connection) -> None:
        self._name, self._worker, self._progress, self._connection = name, worker, progress, connection
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(UNITS_PER_WORKER, thread_name_prefix="unit")

    def run(self) -> None:
        """Until nobody sends any more."""
        self.send(Ready(worker=self._name, facts=self._worker.facts))
        while True:
            try:
                assignment = self._connection.recv()
            except EOFError:
                return
            self._pool.submit(self._serve, assignment)

    def send(self, outcome: Outcome) -> None:
        """Tells what happened; ends the process where nobody listens."""
        with self._sending:
            try:
                self._connection.send(outcome)
            except OSError:
                os._exit(0)

    def _serve(self, assignment: Assignment) -> None:
        number = assignment.number
        try:
            with self._progress.track(number) as track:
                report = self._worker.score(assignment.attempt, track)
        except BaseException as error:  # noqa: BLE001 - whatever a row does must reach the driver: Rust panics, too
            self.send(self._explain(number, error))
        else:
            self.send(Done(worker=self._name, attempt=number, report=report))

    def _explain(self, number: int, error: BaseException) -> Outcome:
        cause = cause_of(error)
        if cause is Cause.ROWS and not isinstance(error, WorkerUnfit):
            try:
                self._worker.prove()
            except WorkerUnfit as found:
                error = found
        if isinstance(error, WorkerUnfit):
            return Ended(worker=self._name, blame=Blame.WORKER, reason=str(error))
        reason = f"raised {type(error).__name__}: {error}" if cause is Cause.ROWS else str(error)
        return Failed(worker=self._name, attempt=number, cause=cause, reason=reason)


_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (InputChanged, Cause.CHANGED),
    (SourceUnavailable, Cause.SOURCE),
    (UnitUnreadable, Cause.UNREADABLE),
    (StoreError, Cause.STORE),
    (WorkerUnfit, Cause.ROWS),
    (ScoringError, Cause.REFUSED),
)


def cause_of(error: BaseException) -> Cause:
    """What kind of thing an error of an attempt is; anything unheard of may be a row's doing."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), Cause.ROWS)


def serve(name: str, connection: Connection, progress: Progress) -> None:
    """Becomes a worker.

    Args:
        name: Of the worker.
        connection: Brings the request, then assignments; takes outcomes.
        progress: Where it tells how far it is.
    """
    request: ScoreRequest = connection.recv()
    try:
        worker = Worker(request)
    except GraphkilnError as error:
        connection.send(Ended(worker=name, blame=Blame.WORKER, reason=f"it could not start: {error}"))
        return
    Serving(name, worker, progress, connection).run()


def main() -> None:
    """Runs as a process: the name, and two descriptors that were inherited."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is the driver's: it closes the connection
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even a process that is stuck, or stopped
    name, connection, progress = sys.argv[1:]
    status = 1
    try:
        serve(name, Connection(int(connection)), Progress(int(progress)))
        status = 0
    except BaseException:  # noqa: BLE001 - its last words, which `worker_process` reads
        traceback.print_exc()
    finally:
        os._exit(status)  # a thread that is stuck in a decoder must not keep the process


if __name__ == "__main__":
    main()
