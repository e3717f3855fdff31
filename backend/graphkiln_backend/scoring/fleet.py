"""Workers of a run: keep every node full of workers, collect what they return, and replace those that end.

A worker is a process: of this machine (`local_machine`) or of a Ray cluster (`ray_cluster`), both `Machines`. This
module starts replacements, ends workers that hang, and stops using nodes whose workers keep failing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from typing import Any, Protocol

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Computed,
    Ended,
    Event,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Outcome,
    ScoreRequest,
    WorkerReady,
)
from graphkiln_backend.scoring.schedule import UNITS_PER_WORKER
from graphkiln_backend.system.closing import Closeable

MAX_FAILURES = 3  # workers of a node that could not start or computed wrong answers
MAX_LOST = 10  # workers of a living node in a row that were lost before they were ready
START_S = 1800.0  # until a starting worker hangs: compiling a model for a device takes minutes
EMPTY_S = 600.0  # without any node that has room for a worker
WAITING_S = 60.0  # until a worker that is not placed is logged or moved; with free cores it takes seconds
CRASHED = "crashed or was killed"
OUT_OF_MEMORY = "was killed because its node ran out of memory"
_NODES_EVERY_S = 1.0
_HEARTBEAT_S = 2.0
_SUSPENDED_S = 30.0  # between two checks for hanging workers; the driver checks twice a second
_CLOSE_S = 5.0
CALLS = UNITS_PER_WORKER + 2  # concurrent calls of an actor: one per unit, the heartbeat, `close`
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, with the resources that workers may use.

    Attributes:
        id: Unique in the run; Ray's node id.
        name: Host name; followed by a part of the id if several nodes share it.
    """

    id: str
    name: str
    cores: int
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Number of workers that fit on a node, and the resources of each."""

    workers: int
    cores: int
    gpus: int


def room_of(node: Node, cores_per_worker: int, *, on_gpu: bool) -> Room:
    """Return the room of a node: one worker per GPU if the model runs on GPUs, otherwise by cores.

    Args:
        node: The node.
        cores_per_worker: 0 for all cores of the node, or an equal share for each GPU.
        on_gpu: True if the model uses a GPU where there is one.
    """
    gpus = node.gpus if on_gpu else 0
    cores = min(cores_per_worker or node.cores // max(gpus, 1), node.cores)
    workers = min(gpus or node.cores, node.cores // cores) if cores else 0
    return Room(workers=workers, cores=cores, gpus=min(gpus, 1))


class WorkerLost(Exception):
    """The process of a worker is gone.

    Args:
        reason: `CRASHED` or `OUT_OF_MEMORY`.
        detail: More, for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class CallFailed(Exception):
    """A call raised an error although the process of its worker still runs."""


class Machines(Protocol):
    """Machines on which workers run. The fleet treats workers and calls as opaque; calls are hashable."""

    def nodes(self) -> Sequence[Node]:
        """List the nodes that are alive."""

    def check(self, node: Node, version: str, model: str) -> Any:
        """Begin a call that returns why a node cannot take part, or an empty string.

        Args:
            node: The node.
            version: The driver's version of graphkiln.
            model: Folder of the model; empty for one in a remote store.
        """

    def start(self, node: Node, room: Room, name: str, request: ScoreRequest) -> Any:
        """Start a worker, whose process has a `worker.WorkerActor`; its calls wait until it is there."""

    def call(self, worker: Any, method: str, *arguments: object) -> Any:
        """Begin to call a method of a worker; up to `CALLS` run at the same time."""

    def wait(self, calls: Sequence[Any], timeout_s: float, *, every: bool = False) -> Sequence[Any]:
        """Wait until one of these calls is over, or every one; return those that are."""

    def result(self, call: Any) -> Any:
        """Return the result of a call that is over.

        Raises:
            WorkerLost: The process of its worker is gone.
            CallFailed: It raised an error.
        """

    def kill(self, worker: Any) -> None:
        """End the process of a worker."""


@dataclass(slots=True)
class _Member:
    """A worker of the fleet.

    Attributes:
        heartbeat: Pending call that returns the progress of the worker.
        calls: Other pending calls.
        committing: The calls of these that commit, with the number of the attempt.
        since: Time of the last progress, by `time.monotonic`; until it is placed, the time of its start.
        progress: Counter of the worker; None until it is placed.
        ready: True once it was ready.
    """

    worker: Any
    node: Node
    heartbeat: Any
    calls: set[Any]
    committing: dict[Any, int] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    progress: int | None = None
    ready: bool = False


class Fleet(Closeable):
    """Workers on all nodes.

    Args:
        machines: The nodes.
        request: The run.
        configuration: Expected digest of the model and of everything that changes an answer.
        on_gpu: True if the model uses a GPU where there is one.
        report: Called with events of nodes.
    """

    def __init__(
        self,
        machines: Machines,
        request: ScoreRequest,
        configuration: str,
        *,
        on_gpu: bool,
        report: Callable[[Event], None],
    ) -> None:
        self._machines = machines
        self._request, self._configuration, self._on_gpu, self._report = request, configuration, on_gpu, report
        self._members: dict[str, _Member] = {}
        self._nodes: dict[str, Node] = {}
        self._checks: dict[Any, Node] = {}
        self._refused: dict[str, NodeRefused] = {}
        self._failed_check = ""
        self._failures: Counter[str] = Counter()
        self._lost_starts: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()
        self._numbers = count(1)
        self._nodes_listed = float("-inf")
        self._last_not_empty = self._last_hang_check = time.monotonic()
        self._warned = False

    def close(self) -> None:
        """End all workers."""
        closing = [self._machines.call(member.worker, "close") for member in self._members.values()]
        if closing:
            self._machines.wait(closing, _CLOSE_S, every=True)
        for member in self._members.values():
            self._machines.kill(member.worker)
        self._members.clear()

    def assign(self, worker: str, attempt: Attempt) -> None:
        """Start an attempt on a worker that is ready."""
        member = self._members[worker]
        if not member.calls:
            member.since = time.monotonic()
        member.calls.add(self._machines.call(member.worker, "compute", attempt))

    def wait(self, timeout_s: float, hang_timeout_s: Callable[[str], float]) -> Sequence[Outcome]:
        """Wait for outcomes, and start workers wherever there is room.

        Args:
            timeout_s: Maximum time to wait.
            hang_timeout_s: Returns the seconds without progress after which a busy worker is ended.

        Raises:
            ScoringError: No node can take part.
        """
        self._update_nodes()
        owners = {call: name for name, each in self._members.items() for call in (each.heartbeat, *each.calls)}
        pending = [*owners, *self._checks]
        if not pending:
            time.sleep(timeout_s)
            return []
        outcomes: list[Outcome] = []
        for call in self._machines.wait(pending, timeout_s):
            if call in self._checks:
                self._admit(self._checks.pop(call), call)
            elif owners[call] in self._members and (outcome := self._collect(owners[call], call)):
                outcomes.append(outcome)
        return outcomes + self._end_hanging(hang_timeout_s)

    def _collect(self, name: str, call: Any) -> Outcome | None:
        """Process a call that has returned; None if it has no outcome for the schedule."""
        member = self._members[name]
        try:
            returned: Outcome | Computed | int = self._machines.result(call)
        except (WorkerLost, CallFailed) as error:
            return self._end(name, self._lost(name, member, error))
        if isinstance(returned, int):  # the heartbeat
            if returned != member.progress:
                member.progress, member.since = returned, time.monotonic()
            member.heartbeat = self._machines.call(member.worker, "progress", _HEARTBEAT_S)
            return None
        member.calls.discard(call)
        member.committing.pop(call, None)
        if isinstance(returned, Computed):
            # A separate call, so that the driver knows if a worker died while it was committing. Then the result may
            # exist or not: the unit is tried again, and the destination refuses a second result.
            commit = self._machines.call(member.worker, "commit", returned.attempt)
            member.calls.add(commit)
            member.committing[commit] = returned.attempt
            return None
        if isinstance(returned, WorkerReady):
            returned = self._greet(member, returned)
        return self._end(name, returned) if isinstance(returned, Ended) else returned

    def _greet(self, member: _Member, ready: WorkerReady) -> WorkerReady | Ended:
        """Accept a worker that is ready, unless it has another model than the driver."""
        if ready.facts.configuration != self._configuration:
            reason = "it has another version of the model than the driver: make the model store the same on every node"
            return Ended(worker=ready.worker, blame=Blame.WORKER, reason=reason)
        member.ready = True
        del self._lost_starts[member.node.id]
        return replace(ready, facts=replace(ready.facts, node=member.node.name))

    def _lost(self, name: str, member: _Member, error: WorkerLost | CallFailed) -> Ended:
        """Explain the end of a worker whose call failed."""
        _log.info("%s: %s", name, error)
        if isinstance(error, CallFailed):
            return Ended(worker=name, blame=Blame.WORKER, reason=f"its actor failed: {error}")
        if error.reason == OUT_OF_MEMORY:
            return Ended(worker=name, blame=Blame.ROWS, reason=OUT_OF_MEMORY)
        if all(each.id != member.node.id for each in self._machines.nodes()):
            return Ended(worker=name, blame=Blame.NODE, reason="its node is gone")
        if not member.ready:
            self._lost_starts[member.node.id] += 1
            if self._lost_starts[member.node.id] == MAX_LOST:
                first = str(error).partition("\n")[0]
                self._refuse(member.node, f"{MAX_LOST} workers in a row were lost before they were ready: {first}")
        return Ended(worker=name, blame=Blame.ROWS, reason=CRASHED)

    def _end_hanging(self, hang_timeout_s: Callable[[str], float]) -> list[Outcome]:
        """End busy workers without progress."""
        now = time.monotonic()
        if now - self._last_hang_check > _SUSPENDED_S:  # this process or its machine was suspended
            for member in self._members.values():
                member.since = now
        self._last_hang_check = now
        ended: list[Outcome] = []
        for name, member in list(self._members.items()):
            if member.progress is None or not member.calls:
                continue
            if (silent_s := now - member.since) > (hang_timeout_s(name) if member.ready else START_S):
                blame = Blame.ROWS if member.ready else Blame.WORKER
                ended.append(self._end(name, Ended(worker=name, blame=blame, reason=f"hung for {silent_s:.0f} s")))
        return ended

    def _end(self, name: str, ended: Ended) -> Ended:
        """Remove a worker."""
        member = self._members.pop(name)
        self._machines.kill(member.worker)
        if ended.blame is Blame.WORKER:
            self._failures[member.node.id] += 1
            if self._failures[member.node.id] >= MAX_FAILURES:
                self._refuse(member.node, f"{MAX_FAILURES} of its workers failed: {ended.reason}")
        return replace(ended, committing=frozenset(member.committing.values()))

    def _update_nodes(self) -> None:
        """Detect nodes that came or went, and start workers wherever there is room."""
        now = time.monotonic()
        if now - self._nodes_listed < _NODES_EVERY_S:
            return
        self._nodes_listed = now
        living = {node.id: node for node in self._machines.nodes()}
        for node in [node for node_id, node in self._nodes.items() if node_id not in living]:
            del self._nodes[node.id]
            self._report(NodeLost(node=node.name))
        for node in living.values():
            self._check_new(node)
        self._move_waiting(now)
        for node in sorted(self._nodes.values(), key=lambda each: self._moves[each.id]):
            self._fill(node)
        self._check_not_empty(now)

    def _check_new(self, node: Node) -> None:
        known = node.id in self._nodes or node.id in self._refused or node in self._checks.values()
        if known or not self._room(node).workers:
            return
        model = str(self._request.model)
        check = self._machines.check(node, version("graphkiln"), "" if "://" in model else model)
        self._checks[check] = node

    def _admit(self, node: Node, check: Any) -> None:
        try:
            reason = self._machines.result(check)
        except (WorkerLost, CallFailed) as error:  # the node is gone, or is checked again
            self._failed_check = f"{node.name} could not be checked: {str(error).partition(chr(10))[0]}"
            _log.info("%s", self._failed_check)
            return
        if reason:
            self._refuse(node, reason)
        else:
            self._nodes[node.id] = node
            self._report(NodeJoined(node=node.name, workers=self._room(node).workers))
            self._fill(node)

    def _refuse(self, node: Node, reason: str) -> None:
        self._nodes.pop(node.id, None)
        self._refused[node.id] = NodeRefused(node=node.name, reason=reason)
        self._report(self._refused[node.id])

    def _room(self, node: Node) -> Room:
        return room_of(node, self._request.cores_per_worker, on_gpu=self._on_gpu)

    def _free(self, node: Node) -> int:
        """Return how many more workers have room on a node, apart from other users of the cluster."""
        return self._room(node).workers - sum(member.node.id == node.id for member in self._members.values())

    def _fill(self, node: Node) -> None:
        """Start as many workers as a node has room for."""
        room, free = self._room(node), self._free(node)
        started = min(free, self._request.workers - len(self._members)) if self._request.workers else free
        for _ in range(started):
            name = f"worker-{next(self._numbers)}"
            worker = self._machines.start(node, room, name, replace(self._request, cores_per_worker=room.cores))
            start, heartbeat = (self._machines.call(worker, "start"), self._machines.call(worker, "progress", 0.0))
            self._members[name] = _Member(worker=worker, node=node, heartbeat=heartbeat, calls={start})

    def _move_waiting(self, now: float) -> None:
        """End workers that are not placed, because something else uses the cores, if another node has room.

        Without a limit on the number of workers every node is full, and they wait. A node gets more time with each
        worker that was moved away: its workers may be slow to start.
        """
        waiting = {
            name: member
            for name, member in self._members.items()
            if member.progress is None and now - member.since > WAITING_S * (1 + self._moves[member.node.id])
        }
        if waiting and not self._warned:
            self._warned = True
            nodes = ", ".join(dict.fromkeys(each.node.name for each in waiting.values()))
            text = "%d of %d workers have been waiting for cores of %s for %.0f s (a cluster: see `ray status`)"
            _log.warning(text, len(waiting), len(self._members), nodes, WAITING_S)
        for name, member in waiting.items():
            if any(self._free(node) > 0 for node in self._nodes.values() if node.id != member.node.id):
                self._moves[member.node.id] += 1
                self._machines.kill(self._members.pop(name).worker)

    def _check_not_empty(self, now: float) -> None:
        if self._members:
            self._last_not_empty = now
        elif self._refused and not self._checks:
            reasons = "; ".join(f"{each.node}: {each.reason}" for each in self._refused.values())
            raise ScoringError(f"no node can take part: {reasons}")
        elif now - self._last_not_empty > EMPTY_S:
            failed = f" ({self._failed_check})" if self._failed_check else ""
            raise ScoringError(
                f"no node of the cluster could take a worker for {EMPTY_S:.0f} s{failed}",
                hint="`ray status` shows the resources of nodes; if a node has more GPUs than cores, "
                "use --cores-per-worker 1",
            )
