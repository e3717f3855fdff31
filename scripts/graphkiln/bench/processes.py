"""Load generator with several worker processes.

Python threads wait for each other: with eight threads, a response of half a millisecond waits longer for the GIL than
it takes. Callers are therefore spread over processes with few threads each. Requests are encoded before the load
starts.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from graphkiln.bench.arrivals import Arrivals
from graphkiln.bench.generator import (
    Measurement,
    Recording,
    Timing,
    in_turn,
    record_closed_loop,
    record_open_loop,
)
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.system.processes import start
from graphkiln_backend.system.resources import usable_cores

if TYPE_CHECKING:
    from graphkiln_client import Model

_PROCESSES_PER_CORE = 2
_MAX_PROCESSES = 16
_START_DELAY_S = 0.05  # enough for all workers to receive the start time
_EXIT_TIMEOUT_S = 10
_STOP_TIMEOUT_S = 2  # workers that take longer to stop are killed
_TERMINATED = 128 + signal.SIGTERM  # a shell's exit code for SIGTERM
# Workers ignore Ctrl-C from the start; the parent process handles it.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from graphkiln.bench.processes import main; main()"
)

Worker = subprocess.Popen[bytes]
Feeds = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The model under load."""

    client: Mapping[str, Any]
    model: str
    version: str = ""
    shared_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The amount of load.

    Attributes:
        callers: Maximum number of requests in flight; in a closed loop, the constant number.
        arrivals: Due times of an open loop from the start of the warm-up; None for a closed loop.
    """

    callers: int
    seconds: float
    warmup_s: float
    arrivals: Arrivals | None = None

    def share(self, number: int, processes: int) -> Load:
        """Return the callers and arrivals of one process."""
        arrivals = None if self.arrivals is None else self.arrivals[number::processes]
        callers = len(range(number, self.callers, processes))
        return Load(callers=callers, seconds=self.seconds, warmup_s=self.warmup_s, arrivals=arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process; requests take the samples in turn."""

    target: Target
    load: Load
    samples: Sequence[Feeds]


def send_message(pipe: IO[bytes], value: object) -> None:
    """Write a pickled value."""
    pickle.dump(value, pipe)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> Any:
    """Read a pickled value.

    Raises:
        EOFError: The other process has ended.
    """
    return pickle.load(pipe)  # noqa: S301 - the other end of the pipe is our own process


def measure_load(
    target: Target, samples: Sequence[Feeds], load: Load, at_start: Callable[[], None] = lambda: None
) -> Measurement:
    """Load a model from several processes and summarize the recording; see `record_load`."""
    recording = record_load(target, samples, load, at_start)
    return recording.of_closed_loop() if load.arrivals is None else recording.of_open_loop()


def record_load(
    target: Target, samples: Sequence[Feeds], load: Load, at_start: Callable[[], None] = lambda: None
) -> Recording:
    """Load a model from several processes and record every request.

    Args:
        target: Model to load.
        samples: Inputs of the requests, taken in turn.
        load: Amount of load.
        at_start: Called at the start of the measurement, while the load is running.

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
        start = time.perf_counter() + _START_DELAY_S  # all processes share this clock
        for worker in workers:
            _send(worker, start)
        time.sleep(max(start + load.warmup_s - time.perf_counter(), 0))
        at_start()
        return Recording.joined([_receive(worker) for worker in workers])


def process_count(callers: int) -> int:
    """Return the number of processes for a number of callers, limited by the cores."""
    return min(callers, _PROCESSES_PER_CORE * usable_cores(), _MAX_PROCESSES)


def share(samples: Sequence[Feeds], index: int, processes: int) -> Sequence[Feeds]:
    """Return the samples of one process: a part of them, or all in rotated order if there are fewer than processes."""
    if len(samples) >= processes:
        return samples[index::processes]
    first = index % len(samples)
    return [*samples[first:], *samples[:first]]


@contextmanager
def _start(number: int) -> Iterator[list[Worker]]:
    """Start worker processes and end them with the context."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    workers: list[Worker] = []
    try:
        for _ in range(number):
            workers.append(start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield workers
        with suppress(subprocess.TimeoutExpired):
            for worker in workers:
                worker.wait(_EXIT_TIMEOUT_S)  # releases its shared memory
    finally:
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for worker in workers:
            with worker:  # closes its pipes
                try:
                    worker.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    worker.kill()


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
    return MeasurementError(f"a process of the load generator ended with code {worker.wait(_EXIT_TIMEOUT_S)}")


# The code of a worker process.


def work(orders: IO[bytes], reports: IO[bytes]) -> None:
    """Prepare the requests, report None (or an error), wait for the start, and report the recording."""
    job: Job = receive_message(orders)
    with ExitStack() as stack:
        try:
            model = _open(stack, job.target)
            send = in_turn([model.repeatable(feeds) for feeds in job.samples])
            send()  # connects
        except GraphkilnError as error:
            send_message(reports, str(error))
            return
        send_message(reports, None)
        load = job.load
        timing = Timing(seconds=load.seconds, warmup_s=load.warmup_s, start=receive_message(orders))
        if load.arrivals is None:
            recording = record_closed_loop(send, load.callers, timing)
        else:
            recording = record_open_loop(send, load.arrivals.tolist(), timing, load.callers)
        send_message(reports, recording)


def _open(stack: ExitStack, target: Target) -> Model:
    from graphkiln_client import Client

    client = stack.enter_context(Client(**target.client))
    if not target.shared_memory:
        return client.model(target.model, target.version)
    return stack.enter_context(client.shared_memory()).model(target.model, target.version)


def main() -> None:
    """Run the worker until its work is done or its parent ends.

    On SIGTERM, pending requests are waited for, so that shared memory is released.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    watch = threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True)
    watch.start()
    with suppress(EOFError):  # the parent ended before it sent a job
        work(sys.stdin.buffer, sys.stdout.buffer)


def _end_with_parent(orders: int) -> None:
    """Terminate this process when the parent closes its end of the pipe."""
    poller = select.poll()
    poller.register(orders, 0)  # without events, poll(2) returns when the other end is closed
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)
