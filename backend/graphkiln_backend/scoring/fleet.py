"""Workers of a run on Ray: connect to a cluster or start a local one, and keep every node full of workers.

A worker is a Ray actor, and so a process: Ray places it, ends it if its node runs out of memory, and detects that it is
gone. This module starts replacements, ends workers that hang, and stops using nodes whose workers keep failing. It is
the only one in this package that imports Ray.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
from graphkiln_backend.scoring.scratch import MACHINE_TMP, Scratch, scratch_folder
from graphkiln_backend.scoring.worker import WorkerActor
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_cores

_OBJECT_STORE_BYTES = 100 * 2**20  # nothing large travels through it
_CONNECT_S = 10.0
_TOO_LATE = "timed out during startup"  # in the message of Ray's exception
_MAX_PARENT = 18  # characters: Ray creates sockets 89 characters below it, and a socket path may have 107

MAX_FAILURES = 3  # workers of a node that could not start or computed wrong answers
MAX_LOST = 10  # workers of a living node in a row that were lost before they were ready
START_S = 1800.0  # until a starting worker hangs: compiling a model for a device takes minutes
EMPTY_S = 600.0  # without any node that has room for a worker
WAITING_S = 60.0  # until a worker that Ray has not placed is logged or moved; with free cores it takes seconds
CRASHED = "crashed or was killed"
OUT_OF_MEMORY = "was killed because its node ran out of memory"
_NODES_EVERY_S = 1.0
_HEARTBEAT_S = 2.0
_SUSPENDED_S = 30.0  # between two checks for hanging workers; the driver checks twice a second
_CLOSE_S = 5.0
_TOKEN = secrets.token_hex(32)  # of this process: Ray reads it only once
_CALLS = UNITS_PER_WORKER + 2  # concurrent calls of an actor: one per unit, the heartbeat, `close`
_log = logging.getLogger("graphkiln.scoring")


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect this process to Ray during the block. An existing connection of this process is used and kept.

    Args:
        address: Address of a cluster, `HOST:PORT`; empty to start Ray on this machine for the block.

    Raises:
        ScoringError: The cluster cannot be reached or has other versions, Ray cannot be started here, or this process
            is connected to another cluster.
    """
    if ray.is_initialized():
        _check_connected(address)
        yield
        return
    try:
        with _silent(), _attached(address) if address else _started():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Stop Ray from printing the end of each worker to standard output, which it does despite `log_to_driver`."""
    switch, names = "_worker_logs_enabled", vars(import_module("ray._private.worker"))
    before, names[switch] = names[switch], False
    try:
        yield
    finally:
        names[switch] = before


def _check_connected(address: str) -> None:
    """Refuse another cluster than the connected one; a loopback address is any address of this machine."""
    used = ray.get_runtime_context().gcs_address
    (host, port), (used_host, used_port) = _resolve(address), _resolve(used)
    is_used = port == used_port and (host == used_host or host.startswith("127."))
    if address not in {"", "auto"} and not is_used:
        raise ScoringError(
            f"this process is connected to the Ray at {used}, not to {address}",
            hint=f"call ray.shutdown() first, or use address={used}",
        )


def _resolve(address: str) -> tuple[str, str]:
    """Split an address into the IP address, or the name if it is unknown, and the port."""
    host, _, port = address.rpartition(":")
    try:
        return socket.gethostbyname(host), port
    except OSError:
        return host, port


@contextmanager
def _attached(address: str) -> Iterator[None]:
    if "://" in address:
        raise ScoringError(
            f"{address} is a Ray client address, which is not supported",
            hint="use the address of the cluster itself, HOST:6379, or submit a Ray job",
        )
    try:
        if address != "auto":  # fail fast: `ray.init` waits for minutes if there is no server
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ScoringError(
            f"no Ray cluster can be used at {address}: {error}",
            hint="name its head node, HOST:6379, with the same versions of Ray and Python; "
            "`ray status --address` shows whether it runs",
        ) from error
    yield


@contextmanager
def _started() -> Iterator[None]:
    """Run a private, silent Ray on this machine during the block."""
    environment = {
        "RAY_AUTH_TOKEN": _TOKEN,  # without it Ray writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    temporary = Path(tempfile.gettempdir())
    parent = temporary if len(str(temporary)) <= _MAX_PARENT else MACHINE_TMP
    with scratch_folder(Scratch.RAY, parent) as folder, _environment(environment, TMPDIR=str(folder.path)):
        _start(folder.path, tries=3)
        try:
            yield
        finally:
            ray.shutdown()


def _start(folder: Path, tries: int) -> None:
    try:
        ray.init(
            "local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray raises a plain Exception if its start takes more than 30 s
        if _TOO_LATE in str(error) and tries > 1:  # the machine is busy
            _start(folder, tries - 1)
            return
        raise ScoringError(
            f"Ray does not start on this machine: {error}",
            hint="run the same command again once the machine is less busy and its disk has room",
        ) from error


@contextmanager
def _environment(defaults: Mapping[str, str], **always: str) -> Iterator[None]:
    """Set environment variables, `defaults` only if they are unset, and restore them after the block."""
    before = {name: os.environ.get(name) for name in (*defaults, *always, "RAY_AUTH_MODE")}
    os.environ.update({name: value for name, value in defaults.items() if before[name] is None} | always)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of a Ray cluster, with the resources that Ray may use.

    Attributes:
        id: Ray's node id.
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


def living_nodes() -> list[Node]:
    """List the nodes of the cluster."""
    alive = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
    names = Counter(each["NodeManagerHostname"] for each in alive)
    return [
        Node(
            id=each["NodeID"],
            name=name if names[name := each["NodeManagerHostname"]] == 1 else f"{name}/{each['NodeID'][:6]}",
            cores=int(each["Resources"].get("CPU", 0)),
            gpus=int(each["Resources"].get("GPU", 0)),
        )
        for each in alive
    ]


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


def node_check() -> Callable[[str, str], str]:
    """Return the function that checks a node.

    It is a local function because Ray sends those by value: the node may have another graphkiln, or none.
    """

    def check(expected: str, model: str) -> str:
        """Return why the node cannot take part, or an empty string; `model` is empty for one in a remote store."""
        from importlib.metadata import PackageNotFoundError, version

        install = f"install 'graphkiln[score]=={expected}' there"
        try:
            installed = version("graphkiln")
        except PackageNotFoundError:
            return f"it has no graphkiln in its Python environment: {install}"
        if installed != expected:
            return f"it has graphkiln {installed}, the driver {expected}: {install}"
        if model and not (Path(model).is_dir() and os.access(model, os.R_OK | os.X_OK)):
            return f"it cannot read {model}: mount the model store there, or use one on S3, GCS, Azure or Hugging Face"
        return ""

    return check


@dataclass(slots=True)
class _Member:
    """A worker of the fleet.

    Attributes:
        heartbeat: Pending call that returns the progress of the worker.
        calls: Other pending calls.
        committing: The calls of these that commit, with the number of the attempt.
        since: Time of the last progress, by `time.monotonic`; until it is placed, the time of its start.
        progress: Counter of the worker; None until Ray has placed it.
        ready: True once it was ready.
    """

    actor: Any
    node: Node
    heartbeat: Any
    calls: set[Any]
    committing: dict[Any, int] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    progress: int | None = None
    ready: bool = False


class RayFleet(Closeable):
    """Workers on the nodes of the cluster that this process is connected to.

    Args:
        request: The run.
        configuration: Expected digest of the model and of everything that changes an answer.
        on_gpu: True if the model uses a GPU where there is one.
        report: Called with events of nodes.
    """

    def __init__(
        self, request: ScoreRequest, configuration: str, *, on_gpu: bool, report: Callable[[Event], None]
    ) -> None:
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
        self._check_node = ray.remote(num_cpus=0, max_retries=0)(node_check())

    def close(self) -> None:
        """End all workers."""
        closing = [member.actor.close.remote() for member in self._members.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for member in self._members.values():
            ray.kill(member.actor)
        self._members.clear()

    def assign(self, worker: str, attempt: Attempt) -> None:
        """Start an attempt on a worker that is ready."""
        member = self._members[worker]
        if not member.calls:
            member.since = time.monotonic()
        member.calls.add(member.actor.compute.remote(attempt))

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
        done, _ = ray.wait(pending, timeout=timeout_s)
        if done:
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        outcomes: list[Outcome] = []
        for call in done:
            if call in self._checks:
                self._admit(self._checks.pop(call), call)
            elif owners[call] in self._members and (outcome := self._collect(owners[call], call)):
                outcomes.append(outcome)
        return outcomes + self._end_hanging(hang_timeout_s)

    def _collect(self, name: str, call: Any) -> Outcome | None:
        """Process a call that has returned; None if it has no outcome for the schedule."""
        member = self._members[name]
        try:
            returned: Outcome | Computed | int = ray.get(call)
        except RayError as error:
            return self._end(name, self._lost(name, member, error))
        if isinstance(returned, int):  # the heartbeat
            if returned != member.progress:
                member.progress, member.since = returned, time.monotonic()
            member.heartbeat = member.actor.progress.remote(_HEARTBEAT_S)
            return None
        member.calls.discard(call)
        member.committing.pop(call, None)
        if isinstance(returned, Computed):
            # A separate call, so that the driver knows if a worker died while it was committing. Then the result may
            # exist or not: the unit is tried again, and the destination refuses a second result.
            commit = member.actor.commit.remote(returned.attempt)
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

    def _lost(self, name: str, member: _Member, error: RayError) -> Ended:
        """Explain the end of a worker whose call failed."""
        _log.info("%s: %s", name, error)
        if isinstance(error, OutOfMemoryError):
            return Ended(worker=name, blame=Blame.ROWS, reason=OUT_OF_MEMORY)
        if not isinstance(error, RayActorError):
            return Ended(worker=name, blame=Blame.WORKER, reason=f"its actor failed: {error}")
        if all(each.id != member.node.id for each in living_nodes()):
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
        ray.kill(member.actor)
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
        living = {node.id: node for node in living_nodes()}
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
        check = self._check_node.options(scheduling_strategy=_on(node))
        self._checks[check.remote(version("graphkiln"), "" if "://" in model else model)] = node

    def _admit(self, node: Node, check: Any) -> None:
        try:
            reason = ray.get(check)
        except RayError as error:  # the node is gone, or is checked again
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
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_concurrency": _CALLS, "max_restarts": 0}
        actor_class = ray.remote(WorkerActor).options(scheduling_strategy=_on(node), **options)
        for _ in range(started):
            name = f"worker-{next(self._numbers)}"
            actor: Any = actor_class.remote(name, replace(self._request, cores_per_worker=room.cores))
            start = actor.start.remote()
            self._members[name] = _Member(actor=actor, node=node, heartbeat=actor.progress.remote(0.0), calls={start})

    def _move_waiting(self, now: float) -> None:
        """End workers that Ray does not place, because something else uses the cores, if another node has room.

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
            text = "%d of %d workers have been waiting for cores of %s for %.0f s: `ray status` shows who uses them"
            _log.warning(text, len(waiting), len(self._members), nodes, WAITING_S)
        for name, member in waiting.items():
            if any(self._free(node) > 0 for node in self._nodes.values() if node.id != member.node.id):
                self._moves[member.node.id] += 1
                ray.kill(self._members.pop(name).actor)

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


def _on(node: Node) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node.id, soft=False)
