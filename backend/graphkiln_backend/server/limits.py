"""Check the limits of open files, memory and threads before a start, and limit tritonserver's memory."""

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

# Open files: each connection is one; without free ones, Triton (24.10) waits forever.

_LEAST = 256  # a server of a few models, and some connections
_OF_INSTANCE = 3  # in tritonserver, counted with 16 instances
_ENOUGH = 65_536


def raise_file_limit() -> None:
    """Raise the limit of open files of this process as far as the system allows, at most to `_ENOUGH`.

    Raises:
        ServerSetupError: The limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _require(_LEAST, max(most, soft), "a server needs")


def check_files(instances: int) -> None:
    """Refuse instances that would exceed the limit of open files during the start.

    Raises:
        ServerSetupError: The hard limit is too low.
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


# A memory limit of tritonserver's process, so that a request cannot exhaust the machine's memory.
#
# For tensors in JSON, Triton (24.10) allocates memory for the declared shape before it reads the data, and it inflates
# compressed HTTP bodies without bound (1.5 MB became 1.5 GB in 2 s); neither can be configured. With the limit such an
# allocation fails: the request gets a 500, or Triton exits and the supervisor restarts it, instead of the kernel's
# out-of-memory killer ending any process.
#
# Graphs are in the instances, which lift the limit for themselves. The stacks of threads count, 8 MB of address space
# each: 34 models with two instances have 2,472 threads. So the limit rises with their number.

_MEMORY = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
_LEAST_BYTES = 2 << 30  # tritonserver starts with 0.8 GB of counted address space
_SHARE = 2
# tritonserver without stacks, before requests: 244 MB with one model, 256 MB with 34.
_OWN_BYTES = 512 << 20
_LOADING_BYTES = 4 << 30  # for new threads between two checks while models load: 500 of them
# Stack size without a limit. Source: glibc's ARCH_STACK_DEFAULT_SIZE is less.
_UNLIMITED_STACK = 8 << 20


class MemoryLimit:
    """Limit tritonserver's memory to its own needs, the stacks of its threads, and a margin for requests.

    Args:
        pid: The process.
        limit_bytes: Private writable memory for requests; 0 for no limit.
    """

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self._pid = pid
        self._limit_bytes = limit_bytes
        self._stack_bytes = _stack_size()
        self._users_bytes: int | None = None

    def follow(self, *, live: bool) -> None:
        """Update the limit for the present number of threads. A lower limit of the user stays.

        Args:
            live: Whether the server accepts requests; before, hundreds of threads may start.
        """
        if not self._limit_bytes:
            return
        with suppress(OSError, ValueError):  # it has just exited, or the system has no such limit
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
    """Stack size of a new thread in bytes. Source: pthread_attr_init(3)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft


def default_limit() -> int:
    """Half of the free memory in bytes, at least `_LEAST_BYTES`."""
    return max(free_memory() // _SHARE, _LEAST_BYTES)


def free_memory() -> int:
    """Available memory of the machine and the container, in bytes. Source: proc(5), /proc/meminfo."""
    lines = map(str.split, _MEMORY.read_text().splitlines())
    available = next(int(line[1]) << 10 for line in lines if line[0] == _AVAILABLE)
    return min([available, *(group.free_bytes for group in memory_groups())])


# Threads of the models' instances in tritonserver.
#
# Triton's Python backend (24.10) has a pool of 32 threads for each instance, for requests that a model sends inside the
# server and for streamed responses, which models with a graph do not use: 34 models with two instances had 2,472
# threads in tritonserver. Podman allows 2,048 per container, OpenShift 4,096 per pod; Triton aborts beyond.
#
# Source: Triton Python backend, `thread-pool-size`; podman-run(1), `--pids-limit`; Red Hat OpenShift, `podPidsLimit`.

_POOL = 32  # Triton's default
_LEAST_POOL = 8  # for models that send requests inside the server, such as `NAME.images`
_MOST_IN_POOLS = 1024
_BESIDE_POOL = 12  # minimum threads of an instance beside its pool: 4 in tritonserver, 8 in its process
_OF_SERVER = 50
_MORE = "docker run --pids-limit=-1, podman run --pids-limit=0, podPidsLimit of a node, TasksMax= of systemd"


def pool_size(instances: int) -> int:
    """Threads in the pool of each instance.

    Args:
        instances: Number of instances; 0 if models are loaded later, for Triton's default.
    """
    return max(_LEAST_POOL, min(_POOL, _MOST_IN_POOLS // max(instances, 1)))


def check_threads(instances: int) -> None:
    """Raise the limit of processes as far as allowed, and refuse instances that would exceed it.

    Raises:
        ServerSetupError: The limit is too low.
    """
    needed = _OF_SERVER + instances * (pool_size(instances) + _BESIDE_POOL)
    for allowed, hint in (*_allowed_by_groups(), *_allowed_to_user()):
        if needed > allowed:
            raise ServerSetupError(
                f"{instances} model instances need at least {needed} threads, and only {allowed} more may run here",
                hint=f"{hint}; or fewer models, or instances of each: instance_group {{ count: 1 }}",
            )


def _allowed_by_groups(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[int, str]]:
    """Yield the free threads of each control group of this process, with a hint to raise the limit."""
    for folder, _ in own_groups("pids", cgroups, own):
        most, now = (_number(read_file(folder / f"pids.{name}")) for name in ("max", "current"))
        if most is not None:
            yield max(most - (now or 0), 0), _MORE


def _allowed_to_user() -> Iterator[tuple[int, str]]:
    """Raise the process limit of the user to its maximum and yield it; root has no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    if hard != resource.RLIM_INFINITY:
        yield hard, "ulimit -u, as root"


def _number(text: str) -> int | None:
    """Parse a number; None for `max` or an empty text."""
    return int(text) if text.strip().isdecimal() else None


# Memory of an instance's process without its graph: 42 to 49 MB, see docs/operations.md.
INSTANCE_BYTES = 45 << 20


def check_instances(instances: int) -> None:
    """Refuse too many instances, and warn if memory will be short.

    Args:
        instances: Number of instances; 0 if unknown.

    Raises:
        ServerSetupError: They need more threads or open files than the limits allow.
    """
    check_threads(instances)
    check_files(instances)
    needed, free = instances * INSTANCE_BYTES, free_memory()
    if needed > free:
        _log.warning(
            "%d model instances need %s beside their graphs, and %s of memory is free: the kernel may kill some",
            instances,
            format_size(needed),
            format_size(free),
        )
