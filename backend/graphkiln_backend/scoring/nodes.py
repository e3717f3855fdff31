"""The nodes of a cluster, and how many workers each has room for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, or a container, that Ray runs on.

    Attributes:
        id: Ray's.
        name: Of the machine; with a part of the id where several have the same.
        cores: That Ray may use.
        gpus: That Ray may use.
        memory_bytes: That Ray may use.
    """

    id: str
    name: str
    cores: int
    gpus: int
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What the workers of a node get.

    Attributes:
        workers: How many there are.
        cores: Of each.
        gpus: Of each, 0 or 1.
        memory_bytes: Of each: its share of the node's.
    """

    workers: int
    cores: int
    gpus: int
    memory_bytes: float


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
        memory_bytes=resources.get("memory", 0.0),
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
    share = node.memory_bytes / max(workers, 1)
    return Room(workers=workers, cores=cores, gpus=min(gpus, 1), memory_bytes=share)


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Makes Ray run something on a node, or not at all."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
