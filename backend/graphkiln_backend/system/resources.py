"""Cores and memory that this process may really use: affinity, control groups and the user's settings."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError

# The control groups that this process is in: that of a container, a service or a job, and those around it.
#
# Source: the kernel's cgroup-v2.rst; cgroups(7), `/proc/PID/cgroup`.

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def own_groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[Path, int]]:
    """The groups that limit this process, itself or as one around its own: the innermost first.

    Args:
        controller: What they limit, such as `cpu` or `memory`.
        cgroups: Where they are mounted.
        own: The kernel's file that names those of this process.

    Yields:
        The folder of a group, which need not be there (a container sees its own as the root), and the version of the
        kernel's interface, 1 or 2.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # a system without groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, version = cgroups, 2
        elif controller in controllers.split(","):
            root, version = cgroups / controller, 1
        else:
            continue
        folder = root / path.lstrip("/")
        yield from ((place, version) for place in (folder, *folder.parents) if place.is_relative_to(root))


def read_file(path: Path) -> str:
    """A file of a group; empty where there is no such group: a container sees its own as the root."""
    try:
        return path.read_text()
    except OSError:
        return ""


# The memory limits of the control groups that this process is in, and what counts against them.
#
# The kernel counts the cache of files, too, although it takes that back before it ends a process: what was not read
# lately is no memory that is used.
# Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst; Kubernetes, "Node-pressure Eviction" (`workingSet`).

# Version of the interface -> files with the limit and with what was taken; the counter of what can be taken back.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_COUNTERS = "memory.stat"
_UNLIMITED_BYTES = 1 << 60  # what version 1 says where there is no limit is near 2^63


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A group with a limit.

    Attributes:
        limit_bytes: Memory that its processes may take together.
        used_bytes: Memory that they have taken, less what the kernel takes back by itself: files not read lately.
    """

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Memory that is left."""
        return max(self.limit_bytes - self.used_bytes, 0)


def memory_groups(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> list[MemoryGroup]:
    """The groups that limit the memory of this process, itself or through a group around its own.

    Args:
        cgroups: Where they are mounted.
        own: The kernel's file that names those of this process.
    """
    found = (_read_group(folder, *_FILES[version]) for folder, version in own_groups("memory", cgroups, own))
    return [group for group in found if group]


def _read_group(folder: Path, limit_file: str, used_file: str, counter: str) -> MemoryGroup | None:
    limit = _as_bytes(read_file(folder / limit_file))
    if not limit or limit >= _UNLIMITED_BYTES:
        return None
    counters = dict(line.split() for line in read_file(folder / _COUNTERS).splitlines())
    used = _as_bytes(read_file(folder / used_file)) - _as_bytes(counters.get(counter, ""))
    return MemoryGroup(limit_bytes=limit, used_bytes=max(used, 0))


def _as_bytes(text: str) -> int:
    """0 for anything but a number, such as `max`."""
    return int(text) if text.strip().isdecimal() else 0


_NUMA_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")
# The environment variable that says it where nothing limits: a pod that requests cores and has no limit of them.
_CORES_VARIABLE = "GRAPHKILN_CORES"


def usable_cores() -> int:
    """Number of cores, at least 1: the smallest of the affinity mask, the cgroups' CPU quotas and what the user says.

    Raises:
        ServerSetupError: What the user says is no number of cores.
    """
    limits = [len(os.sched_getaffinity(0))]
    quota, wanted = _cgroup_quota(), os.environ.get(_CORES_VARIABLE, "")
    if quota is not None:
        limits.append(math.ceil(quota))
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ServerSetupError(
                f"{_CORES_VARIABLE} is '{wanted}', which is no number of cores",
                hint=f"{_CORES_VARIABLE}=4, or leave it out",
            )
        limits.append(int(wanted))
    return max(1, min(limits))


def _cgroup_quota() -> float | None:
    """The least CPU quota, in cores, of the groups that this process is in; None where none has one."""
    found = (_read_quota(folder, version) for folder, version in own_groups("cpu", CGROUPS, OWN_CGROUPS))
    return min((quota for quota in found if quota is not None), default=None)


def _read_quota(group: Path, version: int) -> float | None:
    """A CPU quota in cores.

    Source: Linux kernel documentation, "Control Group v2" (`cpu.max`) and "CFS Bandwidth Control" (v1).
    """
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:
        return None
    if quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)


def usable_core_numbers() -> tuple[int, ...]:
    """The cores that this process may use by number, as many as are usable.

    Those of a NUMA node are neighbors, and so are the threads of a physical core, which share what computes:
    groups of neighbors have cores of their own. Where not all are usable, second threads of a core are left out first.
    """
    allowed, nodes = os.sched_getaffinity(0), numa_nodes()
    threads = {core: sorted(_threads_of_core(core) & allowed) for core in allowed}
    order = sorted(allowed, key=lambda core: (nodes.get(core, 0), threads[core].index(core), core))
    taken = order[: usable_cores()]
    return tuple(sorted(taken, key=lambda core: (nodes.get(core, 0), threads[core][0], core)))


def _threads_of_core(number: int) -> set[int]:
    """The numbers of all threads of a physical core; only its own where the system does not tell.

    Source: Linux kernel documentation, "How CPU topology info is exported via sysfs" (`core_cpus_list`, once
    `thread_siblings_list`).
    """
    for name in ("core_cpus_list", "thread_siblings_list"):
        with suppress(OSError):
            return set(_read_numbers((_CORES / f"cpu{number}" / "topology" / name).read_text())) | {number}
    return {number}


def has_own_cores() -> bool:
    """True if this process may use all cores that it may run on; with a quota it may run on more than it may use."""
    return usable_cores() == len(os.sched_getaffinity(0))


def stay_on(cores: Iterable[int]) -> None:
    """Keep this thread, and those that it starts from now on, on some cores.

    Args:
        cores: Their numbers; nothing happens where there are none.

    Raises:
        OSError: This process may use none of them.

    Source: sched_setaffinity(2): a thread inherits the mask of the one that creates it.
    """
    if kept := set(cores):
        os.sched_setaffinity(0, kept)


def numa_nodes() -> dict[int, int]:
    """The NUMA node of each core by number; empty where the system tells of none.

    Source: Linux kernel documentation, "sysfs-devices-node" (`cpulist`).
    """
    found: dict[int, int] = {}
    for path in _NUMA_NODES.glob("node[0-9]*/cpulist"):
        node = int(path.parent.name.removeprefix("node"))
        found |= dict.fromkeys(_read_numbers(path.read_text()), node)
    return found


def _read_numbers(listed: str) -> Iterator[int]:
    """Numbers of a list such as `0-3,8`."""
    for span in filter(None, listed.strip().split(",")):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps what a peak, such as loading a graph, has left in its arenas."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
