"""The load generator in several processes, so that its callers do not wait for each other.

Threads of one Python process take turns: with eight of them, a response of half a millisecond waits for its turn longer
than it took. Callers are spread over processes, each with few threads; requests are encoded before the load begins.
"""

from __future__ import annotations

import itertools
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

from graphkiln.bench.arrivals import Moments
from graphkiln.bench.generator import Measurement, Recording, Timing, record_closed_loop, record_open_loop
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.system.processes import start
from graphkiln_backend.system.resources import usable_cores

if TYPE_CHECKING:
    from graphkiln_client import Model

# Messages between the load generator and its processes: pickled, through their pipes.

Feeds = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The model that is loaded.

    Attributes:
        client: Arguments of `Client`, with the `url`.
        model: Model name.
        version: Model version; empty for the server's choice.
        shared_memory: Whether tensors travel through shared memory.
    """

    client: Mapping[str, Any]
    model: str
    version: str = ""
    shared_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The amount of load.

    Attributes:
        callers: Requests that may be in flight at once; in a closed loop, that always are.
        seconds: How long to measure.
        warmup_s: How long requests are sent before that.
        arrivals: When the requests of an open loop are due, from the start of the warm-up; None for a closed loop.
    """

    callers: int
    seconds: float
    warmup_s: float
    arrivals: Moments | None = None

    def share(self, number: int, processes: int) -> Load:
        """The part of one process: of the callers as of the arrivals."""
        arrivals = None if self.arrivals is None else self.arrivals[number::processes]
        callers = len(range(number, self.callers, processes))
        return Load(callers=callers, seconds=self.seconds, warmup_s=self.warmup_s, arrivals=arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process.

    Attributes:
        target: What it loads.
        load: How much.
        samples: What its requests hold, in turn.
    """

    target: Target
    load: Load
    samples: Sequence[Feeds]


def send_message(pipe: IO[bytes], value: object) -> None:
    """Write a value."""
    pickle.dump(value, pipe)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> Any:
    """Read a value of a process that this program has started, or was started by.

    Raises:
        EOFError: The other side has ended.
    """
    return pickle.load(pipe)  # noqa: S301 - from our own process, through its own pipe


# One process of the load generator, controlled by `processes` through its pipes.

_TERMINATED = 128 + signal.SIGTERM  # as shells say it


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
        send_message(reports, _record(job, send, receive_message(orders)))


def _open(stack: ExitStack, target: Target) -> Model:
    from graphkiln_client import Client

    client = stack.enter_context(Client(**target.client))
    if not target.shared_memory:
        return client.model(target.model, target.version)
    return stack.enter_context(client.shared_memory()).model(target.model, target.version)


def in_turn(requests: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that does the next one each time. Thread-safe: a step of `itertools` is one of the interpreter's."""
    if len(requests) == 1:
        return requests[0]
    turns = itertools.cycle(requests)

    def send() -> object:
        return next(turns)()

    return send


def _record(job: Job, send: Callable[[], object], start: float) -> Recording:
    timing = Timing(seconds=job.load.seconds, warmup_s=job.load.warmup_s, start=start)
    if job.load.arrivals is None:
        return record_closed_loop(send, job.load.callers, timing)
    return record_open_loop(send, job.load.arrivals.tolist(), timing, job.load.callers)


def main() -> None:
    """Work for the process that started this one, and end with it.

    Ctrl-C is for that process. When it terminates this one, requests under way are waited for, so that shared memory is
    given back.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    watch = threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True)
    watch.start()
    with suppress(EOFError):  # the parent ended before it sent a job
        work(sys.stdin.buffer, sys.stdout.buffer)


def _end_with_parent(orders: int) -> None:
    """Terminate this process when the other end of its pipe is closed, which stops the load.

    Source: poll(2): where no event is asked for, it returns when the other end is gone.
    """
    poller = select.poll()
    poller.register(orders, 0)
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)


_PROCESSES_PER_CORE = 2
_MOST_PROCESSES = 16
_AHEAD_S = 0.05  # between telling the processes when to start and that moment
_END_S = 10
_STOP_S = 2  # of a load that is stopped: what hangs longer is killed
# Ctrl-C is for the process that starts it, also while it imports what it needs.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from graphkiln.bench.processes import main; main()"
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
