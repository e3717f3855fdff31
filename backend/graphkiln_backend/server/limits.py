"""Check open files, memory, shared memory and threads before a start, and limit tritonserver's memory."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.repository.overlay import batch_footprints
from graphkiln_backend.server.run_folder import SHARED_MEMORY
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


# Shared memory.
#
# Each Python instance exchanges tensors with tritonserver through a region in /dev/shm that starts at 1 MB and grows on
# demand. Docker's default is 64 MB in total: too little is an error at the start, instead of a crash under load.

_MIN_REGION_BYTES = 1 << 20
_ALIGNMENT = 1 << 20
_HEADROOM = 1.25  # for messages and the allocator's data beside the tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryPlan:
    """Sizes of shared-memory regions.

    Attributes:
        region_bytes: Initial size of each instance's region.
        instances: Number of instances; 0 if unknown.
    """

    region_bytes: int
    instances: int = 0


def plan_shared_memory(mirrors: Sequence[Path], *, free_bytes: int) -> SharedMemoryPlan:
    """Size the regions for the largest batches of the models.

    Raises:
        ServerSetupError: There is too little; the hint names a sufficient size.
    """
    sizes = [region_bytes(footprint) for footprint in batch_footprints(mirrors)]
    needed = sum(sizes)
    if needed > free_bytes:
        raise ServerSetupError(
            f"{SHARED_MEMORY} has {free_bytes >> 20} MB left, but {len(sizes)} model instances need {needed >> 20} MB "
            "for their largest batches",
            hint=f"docker run --shm-size={2 * needed >> 20}m, or a smaller max_batch_size",
        )
    if free_bytes < _MIN_REGION_BYTES:
        raise ServerSetupError(
            f"{SHARED_MEMORY} is full: {free_bytes >> 10} kB left, and an instance begins with 1 MB",
            hint="remove files there (graphkiln doctor lists leftovers of dead runs), or docker run --shm-size=1g",
        )
    largest = max(sizes, default=_MIN_REGION_BYTES)
    # One size for all instances: the largest, if it leaves half of the memory free.
    fits = largest * len(sizes) <= free_bytes // 2
    first = largest if fits else _MIN_REGION_BYTES
    return SharedMemoryPlan(region_bytes=first, instances=len(sizes))


def free_shared_memory() -> int:
    """Free bytes of /dev/shm.

    Raises:
        ServerSetupError: There is no /dev/shm.
    """
    try:
        stats = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise ServerSetupError(
            f"there is no {SHARED_MEMORY}: Triton needs it for tensors", hint="mount a tmpfs there"
        ) from error
    return stats.f_bavail * stats.f_frsize


def region_bytes(footprint_bytes: int) -> int:
    """Size of the region of an instance in bytes, rounded up to whole MiB.

    Args:
        footprint_bytes: Total size of inputs and outputs of its largest batch.
    """
    size_bytes = max(_MIN_REGION_BYTES, int(footprint_bytes * _HEADROOM) + _MIN_REGION_BYTES)
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
