"""A worker process on this machine, whose methods the driver calls through a socket.

Imports nothing large: the command line starts the first process before anything else, so that it imports its modules
while the driver imports its own, reads the model and plans.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from graphkiln_backend.system.processes import end_with_parent, kill_group, start

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_VICTIM = "1000"
_NO_CALL = 0  # in place of the number of a call: the process ends


class WorkerEnded(Exception):
    """The process has ended.

    Args:
        detail: How.
        relieved: True if it was ended because it took too much memory.
    """

    def __init__(self, detail: str, *, relieved: bool) -> None:
        super().__init__(detail)
        self.relieved = relieved


class WorkerCallFailed(Exception):
    """A call raised an error."""


class WorkerProcess:
    """A process with a `worker.WorkerActor`, as seen by the driver. `kill` ends it; so does the end of the driver.

    Attributes:
        pid: Process id.
        relieved: Set to True before it is ended because of its memory.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            # `start` makes a new session, so that Ctrl-C reaches only the driver.
            self._process = start(command, log=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self.pid, self.relieved = self._process.pid, False
        self._connection = Connection(ours.detach())
        self._calls: dict[int, Future[Any]] = {}
        self._changing = threading.Lock()
        self._count, self._ended = 0, ""
        # A thread receives, because a signal that interrupts the main thread would leave half a message.
        threading.Thread(target=self._receive, name="worker-answers", daemon=True).start()

    def begin(self, name: str, request: object, threads: int, environment: Mapping[str, str]) -> None:
        """Make the worker.

        Args:
            name: Name of the worker.
            request: The run, a `ScoreRequest`.
            threads: Number of calls that may run at the same time.
            environment: Variables to set.
        """
        self._send((name, request, threads, dict(environment)))

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Begin to call a method of the worker; its result raises `WorkerEnded` or `WorkerCallFailed`."""
        future: Future[Any] = Future()
        with self._changing:
            self._count += 1
            number = self._count
            if self._ended:
                future.set_exception(WorkerEnded(self._ended, relieved=self.relieved))
                return future
            self._calls[number] = future
        self._send((number, method, arguments))
        return future

    def kill(self) -> None:
        """End the process at once."""
        kill_group(self._process)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # it has ended: `_receive` fails its calls
            self._connection.send(message)

    def _receive(self) -> None:
        reason = ""
        with self._connection, suppress(EOFError, OSError):
            while True:
                number, returned, error = self._connection.recv()
                if number == _NO_CALL:
                    reason = error
                    continue
                with self._changing:
                    future = self._calls.pop(number)
                if error:
                    future.set_exception(WorkerCallFailed(error))
                else:
                    future.set_result(returned)
        ended = reason or f"its process ended with exit status {self._process.wait()}"
        with self._changing:
            self._ended = ended
            lost, self._calls = self._calls, {}
        for future in lost.values():
            future.set_exception(WorkerEnded(ended, relieved=self.relieved))


_early: list[WorkerProcess] = []


@contextmanager
def started_early() -> Iterator[None]:
    """Start a process now, which `take` returns in the block, and end it if it was not taken."""
    _early.append(WorkerProcess())
    try:
        yield
    finally:
        while _early:
            _early.pop().kill()


def take() -> WorkerProcess:
    """Return the process that was started early, or start one."""
    return _early.pop() if _early else WorkerProcess()


def _serve(connection: Connection) -> None:
    """Call methods of a worker, until the driver has closed its end."""
    # These imports take half a second, in which the driver reads the model and plans. Where pandas is installed,
    # pyarrow imports it at the first list.
    import pyarrow as pa

    from graphkiln_backend.scoring.worker import WorkerActor

    pa.array([0])
    name, request, threads, environment = connection.recv()
    os.environ.update(environment)
    actor = WorkerActor(name, request)
    sending = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        returned, error = None, ""
        try:
            returned = getattr(actor, method)(*arguments)
        except Exception as raised:  # noqa: BLE001 - becomes the reason for the end of this worker
            error = f"{type(raised).__name__}: {raised}"
        with sending:
            connection.send((number, returned, error))

    pool = ThreadPoolExecutor(threads)
    while True:
        pool.submit(answer, *connection.recv())


def _run(connection: Connection) -> None:
    end_with_parent()
    with suppress(OSError):
        _OOM_SCORE.write_text(_FIRST_VICTIM)  # if memory runs out, the kernel ends this process, not the driver
    try:
        _serve(connection)
    except EOFError:  # the driver has closed its end
        pass
    except Exception as error:  # noqa: BLE001 - told by the driver
        connection.send((_NO_CALL, None, f"{type(error).__name__}: {error}"))
    os._exit(1)  # whatever the threads are doing


if __name__ == "__main__":
    _run(Connection(int(sys.argv[1])))
