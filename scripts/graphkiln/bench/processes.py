"""The load generator in several processes, so that its callers do not wait for each other.

Threads of one Python process take turns: with eight of them, a response of half a millisecond waits for its turn longer
than it took. Callers are spread over processes, each with few threads; requests are encoded before the load begins.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from graphkiln.bench.generator import Measurement, Recording
from graphkiln.bench.job import Feeds, Job, Load, Target, receive_message, send_message
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.system.processes import start
from graphkiln_backend.system.resources import usable_cores

_PROCESSES_PER_CORE = 2
_MOST_PROCESSES = 16
_AHEAD_S = 0.05  # between telling the processes when to start and that moment
_END_S = 10
_STOP_S = 2  # of a load that is stopped: what hangs longer is killed
# Ctrl-C is for the process that starts it, also while it imports what it needs.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from graphkiln.bench.worker import main; main()"
)

Worker = subprocess.Popen[bytes]


def measure_load(
    target: Target, samples: Sequence[Feeds], load: Load, at_start: Callable[[], None] = lambda: None
) -> Measurement:
    """Load a model from several processes; arguments and errors as for `record_load`."""
    recording = record_load(target, samples, load, at_start)
    return recording.of_closed_loop() if load.arrivals is None else recording.of_open_loop()


def record_load(
    target: Target, samples: Sequence[Feeds], load: Load, at_start: Callable[[], None] = lambda: None
) -> Recording:
    """Load a model from several processes, and keep every request.

    Args:
        target: What to load.
        samples: Inputs; each request has the next ones.
        load: How much.
        at_start: Called between warm-up and measurement, beside the running load.

    Raises:
        MeasurementError: A process cannot send its requests, or has ended.
    """
    number = process_count(load.callers)
    with _start(number) as workers:
        for index, worker in enumerate(workers):
            _send(worker, Job(target=target, load=load.share(index, number), samples=share(samples, index, number)))
        for worker in workers:
            if problem := _receive(worker):
                raise MeasurementError(f"the load generator cannot send its requests: {problem}")
        start = time.perf_counter() + _AHEAD_S  # of the machine's clock, which all processes share
        for worker in workers:
            _send(worker, start)
        time.sleep(max(start + load.warmup_s - time.perf_counter(), 0))
        at_start()
        return Recording.joined([_receive(worker) for worker in workers])


def process_count(callers: int) -> int:
    """As many as there are callers, but no more than keep the cores busy."""
    return min(callers, _PROCESSES_PER_CORE * usable_cores(), _MOST_PROCESSES)


def share(samples: Sequence[Feeds], index: int, processes: int) -> Sequence[Feeds]:
    """The samples of one process: its part of them; where they are fewer than processes all, beginning elsewhere."""
    if len(samples) >= processes:
        return samples[index::processes]
    first = index % len(samples)
    return [*samples[first:], *samples[:first]]


@contextmanager
def _start(number: int) -> Iterator[list[Worker]]:
    """Processes that end with the context."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    workers: list[Worker] = []
    try:
        for _ in range(number):
            workers.append(start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield workers
        with suppress(subprocess.TimeoutExpired):
            for worker in workers:
                worker.wait(_END_S)  # shared memory is given back
    finally:
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + _STOP_S
        for worker in workers:
            _end(worker, max(deadline - time.monotonic(), 0.0))


def _end(worker: Worker, timeout_s: float) -> None:
    try:
        worker.wait(timeout_s)
    except subprocess.TimeoutExpired:
        worker.kill()
    with worker:  # closes its pipes
        pass


def _send(worker: Worker, value: object) -> None:
    if worker.stdin is None:
        raise AssertionError
    try:
        send_message(worker.stdin, value)
    except BrokenPipeError as error:
        raise _ended(worker) from error


def _receive(worker: Worker) -> Any:
    if worker.stdout is None:
        raise AssertionError
    try:
        return receive_message(worker.stdout)
    except EOFError as error:
        raise _ended(worker) from error


def _ended(worker: Worker) -> MeasurementError:
    return MeasurementError(f"a process of the load generator ended with code {worker.wait(_END_S)}")
