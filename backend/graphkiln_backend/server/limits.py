"""Limits of open files, memory and threads: checked before a server of hundreds of instances is started."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.system.resources import CGROUPS, OWN_CGROUPS, memory_groups, own_groups, read_file

_log = logging.getLogger("graphkiln.server")

# Open files: each connection is one, and Triton (24.10) waits for more without an end.

_LEAST = 256  # what a server of a few models has open, and some connections
_OF_INSTANCE = 3  # in tritonserver, as counted with 16 instances
_ENOUGH = 65_536


def raise_file_limit() -> None:
    """Raise the limit of open files of this process as far as the system allows, within reason.

    Raises:
        ServerSetupError: That is too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _require(_LEAST, max(most, soft), "a server needs")


def check_files(instances: int) -> None:
    """Refuse more instances than open files allow: they would fail in the middle of a start.

    Raises:
        ServerSetupError: They need more open files than this process may have, once its limit is raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in {soft, hard}:
        _require(_LEAST + instances * _OF_INSTANCE, hard, f"a server of {instances} model instances needs")


def _require(needed: int, allowed: int, who: str) -> None:
    if allowed < needed:
        enough = max(4096, 2 * needed)
        raise ServerSetupError(
            f"no more than {allowed} files may be open at once: {who} {needed}, and one for each connection",
            hint=f"ulimit -n {enough}; in a container: docker run --ulimit nofile={enough}:{enough}",
        )


# A limit on the memory of tritonserver's own process, so that a small request cannot take all of the machine's.
#
# For a request whose tensors are JSON, Triton (24.10) makes room for the shape before it looks at the data: a few
# bytes can ask for more memory than the machine has, and the kernel's out-of-memory killer decides what ends. Beyond
# the limit the allocation fails, Triton ends, and the supervisor starts it again. It inflates a compressed HTTP body
# without bound, too (1.5 MB became 1.5 GB in 2 s): that allocation fails with a response of 500, and the server goes
# on. No option of Triton's changes either.
#
# Graphs are not in that process but in the instances, which lift the limit for themselves when they start. The stacks
# of its threads are, 8 MB of address space for each: 34 models with two instances have 2,472. The kernel counts them,
# so the limit rises with their number.

_MEMORY = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
_LEAST_BYTES = 2 << 30  # tritonserver starts with 0.8 GB of address space that counts
_SHARE = 2
# What tritonserver has besides stacks before it takes requests: 244 MB with one model, 256 MB with 34.
_OWN_BYTES = 512 << 20
_LOADING_BYTES = 4 << 30  # room for the threads that come between two looks while models load: 500 of them
# Of a thread where the user has set no limit. Source: glibc's ARCH_STACK_DEFAULT_SIZE is less.
_UNLIMITED_STACK = 8 << 20


class MemoryLimit:
    """Hold tritonserver to what it needs itself, the stacks of its threads, and some bytes more.

    Args:
        pid: The process.
        limit_bytes: How much more private writable memory it may take; 0 for any amount.
    """

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self._pid = pid
        self._limit_bytes = limit_bytes
        self._stack_bytes = _stack_size()
        self._users_bytes: int | None = None

    def follow(self, *, live: bool) -> None:
        """Set the limit for the threads that there are now. A lower limit of the user's own stays.

        Args:
            live: Whether the server takes requests. Until then threads may come by the hundred.
        """
        if not self._limit_bytes:
            return
        with suppress(OSError, ValueError):  # it has just ended, or the system knows no such limit
            soft, hard = resource.prlimit(self._pid, resource.RLIMIT_DATA)
            self._users_bytes = soft if self._users_bytes is None else self._users_bytes
            room = self._limit_bytes if live else max(self._limit_bytes, _LOADING_BYTES)
            needed = _OWN_BYTES + room + self._stacks()
            if self._users_bytes == resource.RLIM_INFINITY or needed < self._users_bytes:
                resource.prlimit(self._pid, resource.RLIMIT_DATA, (needed, hard))

    def _stacks(self) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        threads = next((int(line.split()[1]) for line in lines if line.startswith("Threads:")), 0)
        return threads * self._stack_bytes


def _stack_size() -> int:
    """Bytes of a new thread's stack. Source: pthread_attr_init(3)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft


def default_limit() -> int:
    """Half of the memory that is free now, in bytes, but enough to serve at all."""
    return max(free_memory() // _SHARE, _LEAST_BYTES)


def free_memory() -> int:
    """Bytes that a new program could take, of the machine and of the container. Source: proc(5), /proc/meminfo."""
    lines = map(str.split, _MEMORY.read_text().splitlines())
    available = next(int(line[1]) << 10 for line in lines if line[0] == _AVAILABLE)
    return min([available, *(group.free_bytes for group in memory_groups())])


# Threads of the models' instances in tritonserver.
#
# Triton's Python backend (24.10) keeps a pool of 32 threads for each instance, for requests that a model sends inside
# the server and for responses that it streams. Models with a graph do neither: 34 of them with two instances each had
# 2,472 threads in tritonserver alone. Podman allows a container 2,048, OpenShift a pod 4,096, and Triton aborts when it
# gets no more.
#
# Source: Triton Python backend, `thread-pool-size`; podman-run(1), `--pids-limit`; Red Hat OpenShift, `podPidsLimit`.

_POOL = 32  # Triton's own
_LEAST_POOL = 8  # of models that send requests inside the server, such as `NAME.images`
_MOST_IN_POOLS = 1024
_BESIDE_POOL = 12  # threads of an instance beside its pool at least: 4 in tritonserver, 8 in its own process
_OF_SERVER = 50
_MORE = "docker run --pids-limit=-1, podman run --pids-limit=0, podPidsLimit of a node, TasksMax= of systemd"


def pool_size(instances: int) -> int:
    """Threads in the pool of each instance.

    Args:
        instances: Their number; 0 where models are loaded later: Triton's own then.
    """
    return max(_LEAST_POOL, min(_POOL, _MOST_IN_POOLS // max(instances, 1)))


def check_threads(instances: int) -> None:
    """Raise the limit of processes as far as allowed, and refuse more instances than it allows.

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
    """Threads that the control groups of this process allow beyond those in them, with a way to allow more."""
    for folder, _ in own_groups("pids", cgroups, own):
        most, now = (_number(read_file(folder / f"pids.{name}")) for name in ("max", "current"))
        if most is not None:
            yield max(most - (now or 0), 0), _MORE


def _allowed_to_user() -> Iterator[tuple[int, str]]:
    """Threads that the limit of processes allows, once it is as high as may be; root has none."""
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


# What the process of an instance takes beside its graph: 42 to 49 MB, see docs/operations.md.
INSTANCE_BYTES = 45 << 20


def check_instances(instances: int) -> None:
    """Refuse more instances than may run, and warn where memory will be short.

    Args:
        instances: Their number; 0 where it is not known.

    Raises:
        ServerSetupError: They need more threads or open files than may be had.
    """
    check_threads(instances)
    check_files(instances)
    needed, free = instances * INSTANCE_BYTES, free_memory()
    if needed > free:
        _log.warning(
            "%d model instances take %s beside their graphs, and %s of memory are free: the kernel may end some",
            instances,
            format_size(needed),
            format_size(free),
        )
