"""A process for the work of one variant, which keeps its memory, threads and faults apart."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from graphkiln.story.workloads import Predictions, Predictor, Workload
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import safe_path

# Throughput and latencies of a function that classifies images, under a number of concurrent callers.


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """One measurement.

    Attributes:
        per_second: Images per second, counted from completion to completion: the images that were under way before the
            first one, or completed after the deadline, do not count.
        latencies_ms: Latency of every image, from the JPEG to the outputs.
        seconds: Duration of the whole measurement, the last images included.
        images: Number of all images.
    """

    per_second: float
    latencies_ms: tuple[float, ...]
    seconds: float
    images: int


def measure_throughput(
    predict: Callable[[bytes], object], callers: int, jpegs: Sequence[bytes], seconds: float
) -> Throughput:
    """Call a function again and again; each caller takes the next image when its own is done.

    Args:
        predict: Takes one image; called from `callers` threads.
        callers: Concurrent callers.
        jpegs: The images, taken in turn.
        seconds: Duration in which new images are taken; each caller takes at least one.

    Raises:
        BaseException: The first error of `predict`; all callers stop then.
    """
    spans: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    images = itertools.cycle(jpegs)
    images_lock = threading.Lock()
    begun = time.perf_counter()

    def work() -> None:
        try:
            while True:
                with images_lock:
                    jpeg = next(images)
                start = time.perf_counter()
                predict(jpeg)
                spans.append((start, time.perf_counter()))
                if failures or time.perf_counter() - begun >= seconds:
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised below, in the thread that waits
            failures.append(error)

    if callers == 1:
        work()  # in another thread glibc's allocator is slower, by a quarter for eager PyTorch
    else:
        threads = [threading.Thread(target=work) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    completions = sorted(end for _, end in spans)
    return Throughput(
        per_second=_rate(begun, completions, callers, begun + seconds),
        latencies_ms=tuple((end - start) * 1e3 for start, end in spans),
        seconds=completions[-1] - begun,
        images=len(completions),
    )


def _rate(begun: float, completions: Sequence[float], callers: int, deadline: float) -> float:
    """Images per second while all callers were busy.

    One caller is busy all the time. Of several, the first images complete while the pipeline fills, the last ones while
    it runs empty: both ends are left out, and the time counts from completion to completion, so that a batch is never
    cut. Where less than a third of the measurement is left of it, all of it counts: the images of one batch complete
    together, which is no rate.
    """
    whole = len(completions) / (completions[-1] - begun)
    if callers == 1:
        return whole
    first, least = completions[callers - 1], (deadline - begun) / 3
    inside = [moment for moment in completions[callers:] if moment <= deadline]
    return len(inside) / (inside[-1] - first) if inside and inside[-1] - first >= least else whole


_EXIT_S = 30


class Worker(Closeable):
    """Opens a workload in another process, and calls it there.

    Raises:
        MeasurementError: It cannot be opened, or the process ended.
    """

    def __init__(self, workload: Workload, title: str) -> None:
        self._title = title
        context = multiprocessing.get_context("spawn")  # a fork would take this process's memory along
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(workload, theirs), daemon=True)
        with safe_path():
            self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def predict(self, jpegs: Sequence[bytes]) -> Predictions:
        """Predictions for images.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        predictions: Predictions = self._call("predict", tuple(jpegs))
        return predictions

    def parameter_gradients(self, jpeg: bytes) -> tuple[AnyArray, float]:
        """Gradients with respect to the parameters, and their noise; see `Predictor`.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        gradients, noise = self._call("parameter_gradients", jpeg)
        return gradients, noise

    def measure(self, jpegs: Sequence[bytes], seconds: float) -> Throughput:
        """Measure it for some seconds.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        throughput: Throughput = self._call("measure", tuple(jpegs), seconds)
        return throughput

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def close(self) -> None:
        """End the process."""
        self._connection.close()  # the process ends when it sees that
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, *message: Any) -> Any:
        with self._checked_connection():
            self._connection.send(message)
        return self._receive()

    def _receive(self) -> Any:
        with self._checked_connection():
            succeeded, value = self._connection.recv()
        if not succeeded:
            raise MeasurementError(str(value))
        return value

    @contextmanager
    def _checked_connection(self) -> Iterator[None]:
        """Report a broken connection as what it is: the end of the process."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._process.join(_EXIT_S)
            raise MeasurementError(
                f"the process of '{self._title}' ended with code {self._process.exitcode}",
                hint="a negative code is a signal, -9 is often a lack of memory; what was measured is kept: --resume",
            ) from error


def _serve(workload: Workload, connection: Connection) -> None:
    """The process: opens the workload, then executes calls until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the connection
    try:
        with workload() as predictor:
            connection.send((True, None))
            while True:
                name, *arguments = connection.recv()
                connection.send(_execute(predictor, name, arguments))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # noqa: BLE001 - the parent raises it, whatever it is
        connection.send((False, _describe(error)))


def _execute(predictor: Predictor, name: str, arguments: list[Any]) -> tuple[bool, object]:
    """Execute a call; return success, and the value or the error."""
    try:
        if name == "measure":
            return True, measure_throughput(predictor.run_one, predictor.callers, *arguments)
        return True, getattr(predictor, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - the parent raises it, whatever it is
        return False, _describe(error)


def _describe(error: Exception) -> str:
    """One line for our own errors, the traceback for all others."""
    if isinstance(error, GraphkilnError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()
