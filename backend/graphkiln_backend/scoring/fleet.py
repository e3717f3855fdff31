"""Workers on a Ray cluster: on every node as many as it has room for, replaced when they end.

A worker is a Ray actor, and so a process: Ray places it, ends it where a node runs out of memory, and notices when it
is gone. What is left to this module is to start another one, and to end one that hangs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from importlib.metadata import version
from itertools import count
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from graphkiln_backend.scoring import preflight
from graphkiln_backend.scoring.cluster import Node, Room, living_nodes, on_node, room_of
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Ended,
    Event,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Outcome,
    Ready,
)
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.schedule import UNITS_PER_WORKER
from graphkiln_backend.scoring.worker import WorkerActor
from graphkiln_backend.system.closing import Closeable

MOST_FAILURES = 3  # workers of a node that could not start or computed wrongly; after that the node is not used again
MOST_LOST = 10  # workers in a row that a living node lost before they were ready; it cannot be all chance then
START_S = 1800.0  # a worker that is not ready by then hangs: compiling a model for a device takes minutes
EMPTY_S = 600.0  # how long a run waits for nodes to come, or to come back
WAITING_S = 60.0  # how long an actor may take to begin before that is logged: Ray needs seconds where cores are free
CRASHED = "ended its worker: it crashed or was killed"
OUT_OF_MEMORY = "ended its worker: its node ran out of memory"
_LOOK_S = 1.0
_HEARTBEAT_S = 2.0  # between two looks at whether a worker goes on
_SUSPENDED_S = 30.0  # the driver looks more often
_CLOSE_S = 5.0
# Calls at a time in an actor: each unit, one that watches, one that closes.
_CALLS = UNITS_PER_WORKER + 2
_log = logging.getLogger("graphkiln.scoring")


class _Stage(Enum):
    """Step of a worker that a call asks for."""

    START = auto()
    COMPUTE = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has not returned.

    Attributes:
        attempt: Number of the attempt; None for the start.
    """

    stage: _Stage
    attempt: int | None = None


@dataclass(slots=True)
class _Member:
    """A worker.

    Attributes:
        actor: Ray's handle.
        heartbeat_call: The call that returns whether it goes on.
        calls: The others, by Ray's reference to what they return.
        since: When it was seen to go on, by `time.monotonic`; before it is placed, when it was asked for.
        progress: What it had done by then, as a number; None before it is placed.
        ready: Whether it was ever ready.
    """

    actor: Any
    node: Node
    heartbeat_call: Any
    calls: dict[Any, _Call]
    since: float = field(default_factory=time.monotonic)
    progress: int | None = None
    ready: bool = False


class RayFleet(Closeable):
    """Workers on the nodes of the cluster that this process is connected to.

    Args:
        request: The run.
        configuration: What each worker must compute: digest of the model and of all that changes an answer.
        on_gpu: Whether the model runs on a GPU where there is one.
        report: Called with the nodes that come and go.
    """

    def __init__(
        self, request: ScoreRequest, configuration: str, *, on_gpu: bool, report: Callable[[Event], None]
    ) -> None:
        self._request, self._configuration, self._on_gpu, self._report = request, configuration, on_gpu, report
        self._members: dict[str, _Member] = {}
        self._nodes: dict[str, Node] = {}
        self._examining: dict[Any, Node] = {}
        self._refused: dict[str, NodeRefused] = {}
        self._failures: Counter[str] = Counter()
        self._lost_starts: Counter[str] = Counter()
        self._names = count(1)
        self._looked, self._not_empty = float("-inf"), time.monotonic()
        self._watched = time.monotonic()
        self._warned = False
        ray.cloudpickle.register_pickle_by_value(preflight)  # type: ignore[no-untyped-call]
        self._examine = ray.remote(num_cpus=0, max_retries=0)(preflight.examine_node)

    def close(self) -> None:
        """End the workers."""
        closing = [member.actor.close.remote() for member in self._members.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for member in self._members.values():
            ray.kill(member.actor)
        self._members.clear()

    def assign(self, worker: str, number: int, attempt: Attempt) -> None:
        """Have an attempt computed; `_commit_next` has it committed once that call has returned."""
        member = self._members[worker]
        if not member.calls:
            member.since = time.monotonic()
        member.calls[member.actor.compute.remote(number, attempt)] = _Call(_Stage.COMPUTE, number)

    def wait(self, timeout_s: float, patience_s: float) -> Sequence[Outcome]:
        """Return what has happened since; meanwhile workers are started where there is room.

        Raises:
            ScoringError: No node can take part.
        """
        self._look_at_nodes()
        owners = {call: name for name, each in self._members.items() for call in (each.heartbeat_call, *each.calls)}
        waited = [*owners, *self._examining]
        if not waited:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(waited, timeout=timeout_s)
        if done:
            done, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        outcomes: list[Outcome] = []
        for call in done:
            if call in self._examining:
                self._judge(self._examining.pop(call), call)
            elif owners[call] in self._members and (outcome := self._collect(owners[call], call)):
                outcomes.append(outcome)
        return outcomes + self._end_hanging(patience_s)

    def _collect(self, name: str, reference: Any) -> Outcome | None:
        """Take in a call that has returned; None where nothing follows from it yet."""
        member = self._members[name]
        try:
            returned = ray.get(reference)
        except RayActorError as error:
            return self._end(name, self._lost(name, member, error))
        except OutOfMemoryError:
            return self._end(name, Ended(worker=name, blame=Blame.ROWS, reason=OUT_OF_MEMORY))
        except RayError as error:
            return self._end(name, Ended(worker=name, blame=Blame.WORKER, reason=f"its actor failed: {error}"))
        if reference == member.heartbeat_call:
            if returned != member.progress:
                member.progress, member.since = returned, time.monotonic()
            member.heartbeat_call = member.actor.progress.remote(_HEARTBEAT_S)
            return None
        call = member.calls.pop(reference)
        if call.stage is _Stage.COMPUTE and returned is None:  # computed; a probe or a failure has an outcome instead
            self._commit_next(member, call)
            return None
        outcome = self._greet(member, returned) if isinstance(returned, Ready) else returned
        return self._end(name, outcome) if isinstance(outcome, Ended) else outcome

    def _commit_next(self, member: _Member, computed: _Call) -> None:
        """Have a worker commit what it has computed.

        Computing and committing are separate calls, so that the driver knows during which one a worker died. After a
        death during the commit the result may be written or not: the unit is tried again, and the destination refuses
        a second result.
        """
        reference = member.actor.commit.remote(computed.attempt)
        member.calls[reference] = _Call(_Stage.COMMIT, computed.attempt)

    def _greet(self, member: _Member, ready: Ready) -> Ready | Ended:
        """Take in a worker that is ready, unless it has another model than the driver."""
        if ready.facts.configuration != self._configuration:
            reason = "it has another version of the model than the driver: make the model store the same on every node"
            return Ended(worker=ready.worker, blame=Blame.WORKER, reason=reason)
        member.ready = True
        del self._lost_starts[member.node.id]
        return replace(ready, facts=replace(ready.facts, node=member.node.name))

    def _lost(self, name: str, member: _Member, error: RayActorError) -> Ended:
        alive = any(each.id == member.node.id for each in living_nodes())
        _log.info("%s: %s", name, error)
        if not alive:
            return Ended(worker=name, blame=Blame.NODE, reason="its node is gone")
        if not member.ready:
            self._lost_starts[member.node.id] += 1
            if self._lost_starts[member.node.id] == MOST_LOST:
                first = str(error).partition("\n")[0]
                self._refuse(member.node, f"{MOST_LOST} workers in a row were lost before they were ready: {first}")
        return Ended(worker=name, blame=Blame.ROWS, reason=CRASHED)

    def _end_hanging(self, patience_s: float) -> list[Outcome]:
        """End workers that have something to do, and have not gone on for too long."""
        now = time.monotonic()
        if now - self._watched > _SUSPENDED_S:  # this process was suspended, or its machine
            for member in self._members.values():
                member.since = now
        self._watched = now
        ended: list[Outcome] = []
        for name, member in list(self._members.items()):
            if member.progress is None or not member.calls:
                continue  # Ray has not placed it yet, or it has nothing to do
            if (silent_s := now - member.since) > (patience_s if member.ready else START_S):
                reason = f"hung for {silent_s:.0f} s"
                blame = Blame.ROWS if member.ready else Blame.WORKER
                ended.append(self._end(name, Ended(worker=name, blame=blame, reason=reason)))
        return ended

    def _end(self, name: str, ended: Ended) -> Ended:
        """Remove a worker."""
        member = self._members.pop(name)
        ray.kill(member.actor)
        if ended.blame is Blame.WORKER:
            self._failures[member.node.id] += 1
            if self._failures[member.node.id] >= MOST_FAILURES:
                self._refuse(member.node, f"{MOST_FAILURES} of its workers failed: {ended.reason}")
        commits = [call.attempt for call in member.calls.values() if call.stage is _Stage.COMMIT]
        committing = frozenset(attempt for attempt in commits if attempt is not None)
        return replace(ended, committing=committing)

    def _start(self, node: Node, room: Room) -> None:
        name = f"worker-{next(self._names)}"
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_concurrency": _CALLS, "max_restarts": 0}
        actor_class = ray.remote(WorkerActor).options(scheduling_strategy=on_node(node.id), **options)
        actor: Any = actor_class.remote(name, replace(self._request, cores_per_worker=room.cores))
        calls = {actor.start.remote(): _Call(_Stage.START)}
        heartbeat = actor.progress.remote(0.0)
        self._members[name] = _Member(actor=actor, node=node, heartbeat_call=heartbeat, calls=calls)

    def _look_at_nodes(self) -> None:
        """See which nodes came and went, and fill the room that there is."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        living = {node.id: node for node in living_nodes()}
        for node in [node for node_id, node in self._nodes.items() if node_id not in living]:
            del self._nodes[node.id]
            self._report(NodeLost(node=node.name))
        for node in living.values():
            self._examine_new(node)
        for node in self._nodes.values():
            self._fill(node)
        self._check_not_empty(now)
        self._warn_of_waiting(now)

    def _examine_new(self, node: Node) -> None:
        known = node.id in self._nodes or node.id in self._refused or node in self._examining.values()
        if known or not self._room(node).workers:
            return
        model = str(self._request.model)
        examined = self._examine.options(scheduling_strategy=on_node(node.id)).remote(
            version("graphkiln"), "" if "://" in model else model
        )
        self._examining[examined] = node

    def _judge(self, node: Node, examined: Any) -> None:
        try:
            reason = ray.get(examined)
        except RayError as error:
            _log.info("node %s could not be examined: %s", node.name, error)
            return  # it is gone, or is examined again
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

    def _fill(self, node: Node) -> None:
        room = self._room(node)
        there = sum(member.node.id == node.id for member in self._members.values())
        limit = self._request.workers or len(self._members) + room.workers
        for _ in range(min(room.workers - there, limit - len(self._members))):
            self._start(node, room)

    def _warn_of_waiting(self, now: float) -> None:
        """Log once that workers do not begin: Ray has room for them by its size, and lends that to others."""
        waiting = [each for each in self._members.values() if each.progress is None and now - each.since > WAITING_S]
        if waiting and not self._warned:
            self._warned = True
            nodes = ", ".join(dict.fromkeys(each.node.name for each in waiting))
            text = "%d of %d workers have been waiting for cores of %s for %.0f s: `ray status` tells who uses them"
            _log.warning(text, len(waiting), len(self._members), nodes, WAITING_S)

    def _check_not_empty(self, now: float) -> None:
        if self._members or self._examining:
            self._not_empty = now
        elif self._refused:
            reasons = "; ".join(f"{each.node}: {each.reason}" for each in self._refused.values())
            raise ScoringError(f"no node can take part: {reasons}")
        elif now - self._not_empty > EMPTY_S:
            raise ScoringError(
                f"no node of the cluster had room for a worker for {EMPTY_S:.0f} s",
                hint="`ray status` tells what nodes lend; one of more GPUs than cores needs --cores-per-worker 1",
            )
