"""How many threads the models' instances have in tritonserver, and whether that many may run here.

Triton's Python backend (24.10) keeps a pool of 32 threads for each instance, for requests that a model sends inside the
server and for responses that it streams. Models with a graph do neither: 34 of them with two instances each had 2,472
threads in tritonserver alone. Podman allows a container 2,048, OpenShift a pod 4,096, and Triton aborts when it gets no
more.

Source: Triton Python backend, `thread-pool-size`; podman-run(1), `--pids-limit`; Red Hat OpenShift, `podPidsLimit`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.system.resources import CGROUPS, OWN_CGROUPS, own_groups, read_file

_POOL = 32
"""Triton's own."""
_LEAST_POOL = 8
"""Of models that send requests inside the server, such as `NAME.images`."""
_MOST_IN_POOLS = 1024
_BESIDE_POOL = 12
"""Threads of an instance beside its pool at least: 4 in tritonserver, 8 in its own process."""
_OF_SERVER = 50
_MORE = "docker run --pids-limit=-1, podman run --pids-limit=0, podPidsLimit of a node, TasksMax= of systemd"


def pool_size(instances: int) -> int:
    """Threads in the pool of each instance.

    Args:
        instances: How many there are; 0 where nobody knows, because models are loaded later: Triton's own then.
    """
    return max(_LEAST_POOL, min(_POOL, _MOST_IN_POOLS // max(instances, 1)))


def check_threads(instances: int) -> None:
    """Raises the limit of this process where it may be raised, and refuses what would end in the middle of a start.

    Args:
        instances: Of all models.

    Raises:
        ServerSetupError: They need more threads than may run here.
    """
    needed = _OF_SERVER + instances * (pool_size(instances) + _BESIDE_POOL)
    for allowed, hint in (*_allowed_by_groups(), *_allowed_to_user()):
        if needed > allowed:
            raise ServerSetupError(
                f"{instances} model instances need {needed} threads at least, and {allowed} more may run here",
                hint=f"{hint}; or fewer models, or instances of each: instance_group {{ count: 1 }}",
            )


def _allowed_by_groups(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[int, str]]:
    """What the control groups of this process allow beyond what runs in them, with a way to allow more."""
    for folder, _ in own_groups("pids", cgroups, own):
        most, now = (_number(read_file(folder / f"pids.{name}")) for name in ("max", "current"))
        if most is not None:
            yield max(most - (now or 0), 0), _MORE


def _allowed_to_user() -> Iterator[tuple[int, str]]:
    """What the limit of processes allows, once it is as high as may be; root has none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    if hard != resource.RLIM_INFINITY:
        yield hard, "ulimit -u, as root"


def _number(text: str) -> int | None:
    """None for anything but a number, such as `max`, or nothing."""
    return int(text) if text.strip().isdecimal() else None
