"""This machine alone as the only node of a fleet: a worker is a process that the driver starts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

import psutil

from graphkiln_backend.engines.hardware import VISIBLE_GPUS, gpus
from graphkiln_backend.scoring.fleet import CALLS, CRASHED, OUT_OF_MEMORY, CallFailed, Node, Room, WorkerLost
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.scratch import remove_dead_scratch
from graphkiln_backend.scoring.worker_process import WorkerCallFailed, WorkerEnded, WorkerProcess, take
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import memory_groups, usable_cores

_LOOK_S = 0.25  # between two looks at the memory
_RESERVE = 0.05  # share of the memory that workers must leave


class LocalMachine(Closeable):
    """This machine; see `fleet.Machines`."""

    def __init__(self) -> None:
        self._node = Node(id="local", name=socket.gethostname(), cores=usable_cores(), gpus=len(gpus()))
        self._gpus: dict[WorkerProcess, int | None] = {}  # number of the GPU of each worker, if it has one
        self._looked_at = 0.0

    def close(self) -> None:
        """Remove what workers left that were ended while they started."""
        remove_dead_scratch()

    def nodes(self) -> Sequence[Node]:
        """List this machine."""
        return [self._node]

    def check(self, _node: Node, _version: str, _model: str) -> Future[str]:
        """Return no problem: the driver itself has read the model here."""
        checked: Future[str] = Future()
        checked.set_result("")
        return checked

    def start(self, _node: Node, room: Room, name: str, request: ScoreRequest) -> WorkerProcess:
        """Start a worker."""
        worker = take()
        self._gpus[worker] = None
        worker.begin(name, request, CALLS, self._lend_gpu(worker) if room.gpus else {})
        return worker

    def call(self, worker: WorkerProcess, method: str, *arguments: object) -> Future[Any]:
        """Call a method of a worker."""
        return worker.call(method, *arguments)

    def wait(self, calls: Sequence[Future[Any]], timeout_s: float, *, every: bool = False) -> Sequence[Future[Any]]:
        """Wait for calls."""
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._relieve()
        return list(wait(calls, timeout_s, ALL_COMPLETED if every else FIRST_COMPLETED).done)

    def result(self, call: Future[Any]) -> Any:
        """Return the result of a call."""
        try:
            return call.result()
        except WorkerEnded as error:
            raise WorkerLost(OUT_OF_MEMORY if error.relieved else CRASHED, str(error)) from error
        except WorkerCallFailed as error:
            raise CallFailed(str(error)) from error

    def kill(self, worker: WorkerProcess) -> None:
        """End a worker."""
        worker.kill()
        self._gpus.pop(worker, None)

    def _relieve(self) -> None:
        """End the largest worker before memory runs out: the kernel may end all processes of a container at once.

        Ray's memory monitor does the same at the same limit. A worker that holds less than what is left is no reason.
        """
        machine = psutil.virtual_memory()
        rooms = [(machine.total, machine.available), *((each.limit_bytes, each.free_bytes) for each in memory_groups())]
        if short := [free for limit, free in rooms if free < _RESERVE * limit]:
            sizes: dict[WorkerProcess, int] = {}
            for worker in self._gpus:
                with suppress(psutil.NoSuchProcess):
                    sizes[worker] = psutil.Process(worker.pid).memory_info().rss
            largest = max(sizes, key=lambda each: sizes[each], default=None)
            if largest and sizes[largest] > min(short):
                largest.relieved = True
                largest.kill()

    def _lend_gpu(self, worker: WorkerProcess) -> dict[str, str]:
        """Return the variable that shows a worker one GPU that no other worker has."""
        used = set(self._gpus.values())
        number = next(each for each in range(self._node.gpus) if each not in used)
        self._gpus[worker] = number
        visible = os.environ.get(VISIBLE_GPUS)
        return {VISIBLE_GPUS: visible.split(",")[number] if visible else str(number)}
