"""A process that does the work of one way, so that its memory, its threads and its faults are its own."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil

from graphkiln.story.measuring import Segment, run_segment
from graphkiln.story.work import Answers, Asked, Work
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError

_LEAVE_S = 30


class Worker:
    """Opens some work in another process, and hands it requests. Used as a context manager."""

    def __init__(self, work: Work, title: str) -> None:
        self._title = title
        context = multiprocessing.get_context("spawn")  # a fork would take this process's memory along
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def answers(self, jpegs: Sequence[bytes]) -> Answers:
        """What it answers to images.

        Raises:
            MeasurementError: It failed.
        """
        found: Answers = self._call("answers", tuple(jpegs))
        return found

    def parameter_gradients(self, jpeg: bytes) -> tuple[AnyArray, float]:
        """See `Asked`.

        Raises:
            MeasurementError: It failed.
        """
        row, noise = self._call("parameter_gradients", jpeg)
        return row, noise

    def segment(self, jpegs: Sequence[bytes], seconds: float) -> Segment:
        """Measures it for some seconds.

        Raises:
            MeasurementError: It failed.
        """
        found: Segment = self._call("segment", tuple(jpegs), seconds)
        return found

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()  # it takes that as its end
        self._process.join(_LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, *message: Any) -> Any:
        with self._ended():
            self._connection.send(message)
        return self._receive()

    def _receive(self) -> Any:
        with self._ended():
            good, answer = self._connection.recv()
        if not good:
            raise MeasurementError(str(answer))
        return answer

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """Tells a broken connection for what it is: the end of the process."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._process.join(_LEAVE_S)
            raise MeasurementError(
                f"the process of '{self._title}' ended with code {self._process.exitcode}",
                hint="a negative code is a signal, -9 is often a lack of memory; what was measured is kept: --resume",
            ) from error


class Meter:
    """CPU time and memory of processes and all that they started."""

    def __init__(self, *pids: int) -> None:
        roots = [psutil.Process(pid) for pid in pids]
        self._processes = [each for root in roots for each in (root, *root.children(recursive=True))]

    def cpu_s(self) -> float:
        """CPU seconds that they used so far."""
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return float(sum(each.user + each.system for each in times))

    def memory_mb(self) -> float:
        """Memory in MB, what several of them share counted once."""
        return float(sum(p.memory_full_info().pss for p in self._processes if p.is_running()) / 1e6)


def _serve(work: Work, connection: Connection) -> None:
    """The process: open, then answer calls until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who waits; that one hangs up then
    try:
        with work.open() as asked:
            connection.send((True, None))
            while True:
                name, *arguments = connection.recv()
                connection.send(_answered(asked, name, arguments))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # noqa: BLE001 - it is told to the other side, whatever it is
        connection.send((False, _told(error)))


def _answered(asked: Asked, name: str, arguments: list[Any]) -> tuple[bool, object]:
    try:
        if name == "segment":
            jpegs, seconds = arguments
            return True, run_segment(asked.ask, asked.callers, jpegs, seconds)
        return True, getattr(asked, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - as above
        return False, _told(error)


def _told(error: Exception) -> str:
    """One line for our own errors, the whole story for the rest."""
    if isinstance(error, GraphkilnError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()
