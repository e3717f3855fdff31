"""A Ray cluster as the machines of a fleet: a worker is a Ray actor. No other module of this package imports Ray."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.fleet import CALLS, CRASHED, OUT_OF_MEMORY, CallFailed, Node, Room, WorkerLost
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.worker import WorkerActor

_CONNECT_S = 10.0


@contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Connect this process to a cluster during the block. An existing connection of this process is used and kept.

    Args:
        address: Address of the cluster, `HOST:PORT`; empty for the connected one.

    Raises:
        ScoringError: The cluster cannot be reached or has other versions, or this process is connected to another one.
    """
    if ray.is_initialized():
        _check_connected(address)
        yield RayCluster()
        return
    try:
        with _silent():
            _attach(address)
            yield RayCluster()
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


def _attach(address: str) -> None:
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


class RayCluster:
    """The cluster that this process is connected to; see `fleet.Machines`."""

    def __init__(self) -> None:
        self._check = ray.remote(num_cpus=0, max_retries=0)(node_check())

    def nodes(self) -> list[Node]:
        """List the living nodes."""
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

    def check(self, node: Node, version: str, model: str) -> Any:
        """Begin to check that a node can take part."""
        return self._check.options(scheduling_strategy=_on(node)).remote(version, model)

    def start(self, node: Node, room: Room, name: str, request: ScoreRequest) -> Any:
        """Start an actor, which Ray may place later."""
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_concurrency": CALLS, "max_restarts": 0}
        actor_class = ray.remote(WorkerActor).options(scheduling_strategy=_on(node), **options)
        return actor_class.remote(name, request)

    def call(self, worker: Any, method: str, *arguments: object) -> Any:
        """Call a method of an actor."""
        return getattr(worker, method).remote(*arguments)

    def wait(self, calls: Sequence[Any], timeout_s: float, *, every: bool = False) -> Sequence[Any]:
        """Wait for calls."""
        pending = list(calls)
        done, _ = ray.wait(pending, num_returns=len(pending) if every else 1, timeout=timeout_s)
        if done and not every:
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return done

    def result(self, call: Any) -> Any:
        """Return the result of a call."""
        try:
            return ray.get(call)
        except OutOfMemoryError as error:
            raise WorkerLost(OUT_OF_MEMORY, str(error)) from error
        except RayActorError as error:
            raise WorkerLost(CRASHED, str(error)) from error
        except RayError as error:
            raise CallFailed(str(error)) from error

    def kill(self, worker: Any) -> None:
        """End an actor."""
        ray.kill(worker)


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


def _on(node: Node) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node.id, soft=False)
