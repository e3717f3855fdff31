"""The Ray of a run: a private one on this machine, or an existing cluster."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.scratch import MACHINE_TMP, Scratch, scratch_folder
from graphkiln_backend.system.resources import usable_cores

# The nodes of a cluster, and how many workers each has room for.


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, or a container, that Ray runs on.

    Attributes:
        id: Ray's.
        name: Name of the machine; with a part of the id where several have the same.
        cores: That Ray may use.
        gpus: That Ray may use.
    """

    id: str
    name: str
    cores: int
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Resources of the workers of a node.

    Attributes:
        workers: How many there are.
    """

    workers: int
    cores: int
    gpus: int


def living_nodes() -> list[Node]:
    """Those that the cluster has now."""
    alive = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
    names = Counter(each["NodeManagerHostname"] for each in alive)
    return [_node(each, unique=names[each["NodeManagerHostname"]] == 1) for each in alive]


def _node(found: dict[str, Any], *, unique: bool) -> Node:
    resources, name = found["Resources"], found["NodeManagerHostname"]
    return Node(
        id=found["NodeID"],
        name=name if unique else f"{name}/{found['NodeID'][:6]}",
        cores=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
    )


def room_of(node: Node, cores_per_worker: int, *, on_gpu: bool) -> Room:
    """One worker per GPU where the model runs on GPUs; else one per so many cores.

    Args:
        node: The node.
        cores_per_worker: Cores of each worker; 0 for all of the node, or for an equal part per GPU.
        on_gpu: Whether the model runs on a GPU where there is one.
    """
    gpus = node.gpus if on_gpu else 0
    cores = min(cores_per_worker or node.cores // max(gpus, 1), node.cores)
    workers = min(gpus or node.cores, node.cores // cores) if cores else 0
    return Room(workers=workers, cores=cores, gpus=min(gpus, 1))


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Make Ray run something on a node, or not at all."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


_OBJECT_STORE_BYTES = 100 * 2**20  # nothing large travels through it
_CONNECT_S = 10.0
_LONGEST_PARENT = 18  # characters: Ray puts sockets 89 characters below it, and their paths may have 107


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect this process to a Ray, and leave it whatever happens. A Ray that it is connected to already is used.

    Args:
        address: Address of a cluster, `HOST:PORT`; empty to start one on this machine, which ends with the block.

    Raises:
        ScoringError: No cluster answers there, it is not like this process, or none can be started here; or this
            process is connected to another one.
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
    """Keep Ray from printing the end of each worker on standard output, which it does whatever `log_to_driver` says."""
    switch, names = "_worker_logs_enabled", vars(import_module("ray._private.worker"))
    before, names[switch] = names[switch], False
    try:
        yield
    finally:
        names[switch] = before


def _check_connected(address: str) -> None:
    """Refuse another cluster than the one in use, to which the run would go silently."""
    used = ray.get_runtime_context().gcs_address
    if address not in {"", "auto"} and not _is_same(address, used):
        raise ScoringError(
            f"this process is connected to the Ray at {used}, not to {address}",
            hint="ray.shutdown() before, or name it",
        )


def _is_same(address: str, other: str) -> bool:
    """Compare two addresses of Ray; a loopback address equals any on this machine."""
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    resolved = _resolve(host)
    return port == other_port and (resolved.startswith("127.") or resolved == _resolve(other_host))


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


@contextmanager
def _attached(address: str) -> Iterator[None]:
    if "://" in address:
        raise ScoringError(
            f"{address} is the address of a Ray client", hint="name the cluster itself, HOST:6379, or use a Ray job"
        )
    if address != "auto":  # which Ray finds by itself, on a node of a cluster
        _check_reachable(address)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ScoringError(
            f"no Ray cluster can be used at {address}: {error}",
            hint="`ray status --address` tells whether it is there; Ray and Python must be of the same versions",
        ) from error
    yield


def _check_reachable(address: str) -> None:
    """Connect once first: Ray itself takes minutes to find out that there is no server."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ScoringError(
            f"no Ray cluster can be used at {address}: {error}", hint="name its head node, HOST:6379"
        ) from error


@contextmanager
def _started() -> Iterator[None]:
    """Start a private, silent Ray on this machine, which ends with the block."""
    environment = {
        "RAY_AUTH_TOKEN": _token(),  # without it Ray writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    with _folder() as folder, _environment(environment, TMPDIR=folder):
        _start_ray(folder)
        try:
            yield
        finally:
            ray.shutdown()


def _start_ray(folder: str) -> None:
    try:
        ray.init(
            "local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # a node that takes too long to start is a plain one
        raise ScoringError(
            f"Ray does not start on this machine: {error}",
            hint="the same command tries again: wait where the machine is busy, make room where a disk is full",
        ) from error


@cache
def _token() -> str:
    """The token of this process: Ray reads it once."""
    return secrets.token_hex(32)


@contextmanager
def _folder() -> Iterator[str]:
    parent = Path(tempfile.gettempdir())
    with scratch_folder(Scratch.RAY, parent if len(str(parent)) <= _LONGEST_PARENT else MACHINE_TMP) as folder:
        yield str(folder.path)


@contextmanager
def _environment(values: Mapping[str, str], **always: str) -> Iterator[None]:
    """Set variables that are not set, and others always, and put back what was there."""
    before = {name: os.environ.get(name) for name in (*values, *always, "RAY_AUTH_MODE")}
    os.environ.update({name: value for name, value in values.items() if before[name] is None} | always)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
