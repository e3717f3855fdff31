"""One process of the load generator, controlled by `processes` through its pipes."""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from graphkiln.bench.generator import Recording, Timing, record_closed_loop, record_open_loop
from graphkiln.bench.job import Job, Target, receive_message, send_message
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_client.client import Client, Model

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
