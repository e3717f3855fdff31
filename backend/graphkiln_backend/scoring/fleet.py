"""Workers on a Ray cluster: on every node as many as it has room for, replaced when they end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from graphkiln_backend.scoring import preflight
from graphkiln_backend.scoring.cluster import Node, Room, living_nodes, on_node, room_of
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import Event, NodeJoined, NodeLost, NodeRefused
from graphkiln_backend.scoring.outcomes import Attempt, Blame, Ended, Outcome, Ready
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.worker_process import WorkerProcess
from graphkiln_backend.system.closing import Closeable

# What Ray runs on a node: the keeper of one worker process.
#
# Nothing that a row may do happens in the actor itself. When the actor is gone, its node or somebody outside ended it,
# and no row is to blame; when its process ends, it says how.


class WorkerActor:
    """Keeps a worker process; see `WorkerProcess`.

    Args:
        name: Of the worker.
        request: The run.
        memory_bytes: The worker's share of the node's memory.
    """

    def __init__(self, name: str, request: ScoreRequest, memory_bytes: float) -> None:
        self._process = WorkerProcess(name, request, memory_bytes)

    def assign(self, number: int, attempt: Attempt) -> None:
        """Sends an attempt to the process."""
        self._process.assign(number, attempt)

    def poll(self, timeout_s: float) -> Sequence[Outcome]:
        """What has happened since the last call."""
        return self._process.poll(timeout_s)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


MOST_FAILURES = 3  # workers of a node that could not start or computed wrongly; after that the node is not used again
# Keepers in a row that a living node lost before their workers were ready; it cannot be all chance then.
MOST_LOST = 10
NOBODY_S = 600.0  # how long a run waits for nodes to come, or to come back
# How long an actor may take to begin before that is told: Ray starts one in seconds where cores are free.
WAITING_S = 60.0
_LOOK_S = 1.0
_POLL_S = 5.0
_CLOSE_S = 5.0
_CALLS = 3  # at a time in an actor: one that polls, one that assigns, one that closes
_log = logging.getLogger("graphkiln.scoring")


@dataclass(slots=True)
class _Member:
    """A worker: its actor, where it is, and the call that will say what happens next.

    Attributes:
        actor: Ray's.
        node: Where it is to be.
        poll: The call.
        ready: Whether it was ever ready.
        begins: When its actor was asked for, by the clock of this process; None once it is there.
    """

    actor: Any
    node: Node
    poll: Any
    ready: bool = False
    begins: float | None = None


class RayFleet(Closeable):
    """Workers on the nodes of the cluster that this process is connected to.

    Args:
        request: The run.
        configuration: What each worker must compute: digest of the model and of all that changes an answer.
        on_gpu: Whether the model runs on a GPU where there is one.
        tell: Told which nodes come and go.
    """

    def __init__(
        self, request: ScoreRequest, configuration: str, *, on_gpu: bool, tell: Callable[[Event], None]
    ) -> None:
        self._request, self._configuration, self._on_gpu, self._tell = request, configuration, on_gpu, tell
        self._members: dict[str, _Member] = {}
        self._nodes: dict[str, Node] = {}
        self._examining: dict[Any, Node] = {}
        self._refused: dict[str, NodeRefused] = {}
        self._failures: Counter[str] = Counter()
        self._lost_starts: Counter[str] = Counter()
        self._names = count(1)
        self._looked, self._somebody = float("-inf"), time.monotonic()
        self._told_waiting = False
        ray.cloudpickle.register_pickle_by_value(preflight)  # type: ignore[no-untyped-call]
        self._examine = ray.remote(num_cpus=0, max_retries=0)(preflight.examine_node)

    def close(self) -> None:
        """Ends the workers."""
        closing = [member.actor.close.remote() for member in self._members.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for member in self._members.values():
            ray.kill(member.actor)
        self._members.clear()

    def assign(self, worker: str, number: int, attempt: Attempt) -> None:
        """Sends an attempt; what becomes of it comes with `wait`."""
        self._members[worker].actor.assign.remote(number, attempt)

    def wait(self, timeout_s: float) -> Sequence[Outcome]:
        """What has happened since; meanwhile workers are started where there is room.

        Raises:
            ScoringError: No node can take part.
        """
        self._look()
        polls = {member.poll: name for name, member in self._members.items()}
        waited = [*polls, *self._examining]
        if not waited:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        if not done:
            done, _ = ray.wait(waited, timeout=timeout_s)
        for reference in done:
            if reference in self._examining:
                self._judge(self._examining.pop(reference), reference)
        return [outcome for each in done if each in polls for outcome in self._collect(polls[each])]

    # ---- workers

    def _collect(self, name: str) -> list[Outcome]:
        member = self._members[name]
        try:
            outcomes = [self._note(each) for each in ray.get(member.poll)]
            member.begins = None
        except RayActorError as error:
            outcomes = [self._lost(name, member, error)]
        except RayError as error:
            outcomes = [Ended(worker=name, blame=Blame.WORKER, reason=f"its actor failed: {error}")]
        ended = [each for each in outcomes if isinstance(each, Ended)]
        if ended:
            self._remove(name, ended[-1])
            return [*(each for each in outcomes if not isinstance(each, Ended)), ended[-1]]
        member.poll = member.actor.poll.remote(_POLL_S)
        return outcomes

    def _note(self, outcome: Outcome) -> Outcome:
        """Names the node of a worker that is ready; one that has another model than the driver is none."""
        if not isinstance(outcome, Ready):
            return outcome
        if outcome.facts.configuration != self._configuration:
            reason = "it has another version of the model than the driver: make the model store the same on every node"
            return Ended(worker=outcome.worker, blame=Blame.WORKER, reason=reason)
        member = self._members[outcome.worker]
        member.ready = True
        del self._lost_starts[member.node.id]
        return replace(outcome, facts=replace(outcome.facts, node=member.node.name))

    def _lost(self, name: str, member: _Member, error: RayActorError) -> Ended:
        alive = any(each.id == member.node.id for each in living_nodes())
        reason = "its keeper was ended from outside" if alive else "its node is gone"
        _log.info("%s: %s: %s", name, reason, error)
        if alive and not member.ready:
            self._count_lost_start(member.node, error)
        return Ended(worker=name, blame=Blame.UNKNOWN if alive else Blame.NODE, reason=reason)

    def _count_lost_start(self, node: Node, error: RayActorError) -> None:
        self._lost_starts[node.id] += 1
        if self._lost_starts[node.id] == MOST_LOST:
            first = str(error).partition("\n")[0]
            self._refuse(node, f"{MOST_LOST} workers in a row were lost before they were ready: {first}")

    def _remove(self, name: str, ended: Ended) -> None:
        member = self._members.pop(name)
        ray.wait([member.actor.close.remote()], timeout=_CLOSE_S)  # it removes what the process left
        ray.kill(member.actor)
        if ended.blame is Blame.WORKER:
            self._failures[member.node.id] += 1
            if self._failures[member.node.id] >= MOST_FAILURES:
                self._refuse(member.node, f"{MOST_FAILURES} of its workers failed: {ended.reason}")

    def _start(self, node: Node, room: Room) -> None:
        name = f"worker-{next(self._names)}"
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_concurrency": _CALLS, "max_restarts": 0}
        actor_class = ray.remote(WorkerActor).options(scheduling_strategy=on_node(node.id), **options)
        request = replace(self._request, cores_per_worker=room.cores)
        actor: Any = actor_class.remote(name, request, room.memory_bytes)
        poll = actor.poll.remote(_POLL_S)
        self._members[name] = _Member(actor=actor, node=node, poll=poll, begins=time.monotonic())

    # ---- nodes

    def _look(self) -> None:
        """Sees which nodes came and went, and fills the room that there is."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        living = {node.id: node for node in living_nodes()}
        for node in [node for node_id, node in self._nodes.items() if node_id not in living]:
            del self._nodes[node.id]
            self._tell(NodeLost(node=node.name))
        for node in living.values():
            self._meet(node)
        for node in self._nodes.values():
            self._fill(node)
        self._check_anybody(now)
        self._tell_waiting(now)

    def _meet(self, node: Node) -> None:
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
            self._tell(NodeJoined(node=node.name, workers=self._room(node).workers))
            self._fill(node)

    def _refuse(self, node: Node, reason: str) -> None:
        self._nodes.pop(node.id, None)
        self._refused[node.id] = NodeRefused(node=node.name, reason=reason)
        self._tell(self._refused[node.id])

    def _room(self, node: Node) -> Room:
        return room_of(node, self._request.cores_per_worker, on_gpu=self._on_gpu)

    def _fill(self, node: Node) -> None:
        room = self._room(node)
        there = sum(member.node.id == node.id for member in self._members.values())
        limit = self._request.workers or len(self._members) + room.workers
        for _ in range(min(room.workers - there, limit - len(self._members))):
            self._start(node, room)

    def _tell_waiting(self, now: float) -> None:
        """Says once that workers do not begin: Ray has room for them by its size, and lends that to others."""
        nodes = [each.node.name for each in self._members.values() if each.begins and now - each.begins > WAITING_S]
        if nodes and not self._told_waiting:
            self._told_waiting = True
            text = "%d of %d workers have been waiting for cores of %s for %.0f s: `ray status` tells who uses them"
            _log.warning(text, len(nodes), len(self._members), ", ".join(dict.fromkeys(nodes)), WAITING_S)

    def _check_anybody(self, now: float) -> None:
        if self._members or self._examining:
            self._somebody = now
        elif self._refused:
            told = "; ".join(f"{each.node}: {each.reason}" for each in self._refused.values())
            raise ScoringError(f"no node can take part: {told}")
        elif now - self._somebody > NOBODY_S:
            raise ScoringError(
                f"no node of the cluster had room for a worker for {NOBODY_S:.0f} s",
                hint="`ray status` tells what nodes lend; one of more GPUs than cores needs --cores-per-worker 1",
            )
