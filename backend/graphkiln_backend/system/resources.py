"""CPU cores and memory available to this process: affinity mask, control groups and `GRAPHKILN_CORES`."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_NUMA_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")
_CORES_VARIABLE = "GRAPHKILN_CORES"  # for example in a pod that requests cores but has no CPU limit

# cgroup version -> files of the limit and the usage, and the counter of reclaimable page cache in memory.stat.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 reports values near 2^63 if there is no limit


def own_groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process and their ancestors, innermost first.

    Args:
        controller: Controller such as `cpu` or `memory`.
        cgroups: Mount point of the control groups.
        own: The kernel's list of this process's groups.

    Yields:
        The folder of a group and its cgroup version, 1 or 2. The folder may be missing: inside a container, its own
        group is the root.

    Source: the kernel's cgroup-v2.rst; cgroups(7), `/proc/PID/cgroup`.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no control groups on this system
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
    """Read a file of a control group; return an empty string if the group does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """Memory limit and usage of a control group.

    Attributes:
        limit_bytes: Limit of all processes in the group together.
        used_bytes: Usage without inactive page cache, which the kernel reclaims before it kills a process.

    Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst; Kubernetes, "Node-pressure Eviction" (`workingSet`).
    """

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Memory that is left."""
        return max(self.limit_bytes - self.used_bytes, 0)


def memory_groups(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> list[MemoryGroup]:
    """List the control groups of this process and their ancestors that have a memory limit; see `own_groups`."""
    groups = (_read_memory(folder, *_MEMORY_FILES[version]) for folder, version in own_groups("memory", cgroups, own))
    return [group for group in groups if group]


def _read_memory(folder: Path, limit_file: str, used_file: str, counter: str) -> MemoryGroup | None:
    limit = _as_bytes(read_file(folder / limit_file))
    if not limit or limit >= _UNLIMITED_BYTES:
        return None
    counters = dict(line.split() for line in read_file(folder / "memory.stat").splitlines())
    used = _as_bytes(read_file(folder / used_file)) - _as_bytes(counters.get(counter, ""))
    return MemoryGroup(limit_bytes=limit, used_bytes=max(used, 0))


def _as_bytes(text: str) -> int:
    """Parse a number; 0 for other texts such as `max`."""
    return int(text) if text.strip().isdecimal() else 0


def usable_cores() -> int:
    """Smallest of the affinity mask, the control groups' CPU quotas and `GRAPHKILN_CORES`; at least 1.

    Raises:
        ServerSetupError: `GRAPHKILN_CORES` is not a positive integer.
    """
    limits = [len(os.sched_getaffinity(0))]
    for group, version in own_groups("cpu", CGROUPS, OWN_CGROUPS):
        if quota := _read_quota(group, version):
            limits.append(math.ceil(quota))
    if wanted := os.environ.get(_CORES_VARIABLE, ""):
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ServerSetupError(
                f"{_CORES_VARIABLE} is '{wanted}', which is not a number of cores",
                hint=f"set it to a positive integer, such as {_CORES_VARIABLE}=4, or unset it",
            )
        limits.append(int(wanted))
    return max(1, min(limits))


def _read_quota(group: Path, version: int) -> float | None:
    """Read a CPU quota in cores; None if there is none.

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
    """List the numbers of `usable_cores()` cores, ordered so that neighbors share a NUMA node and a physical core.

    If not all allowed cores are usable, the second threads of physical cores are left out first.
    """
    allowed, nodes = os.sched_getaffinity(0), numa_nodes()
    threads = {core: sorted(_threads_of_core(core) & allowed) for core in allowed}
    order = sorted(allowed, key=lambda core: (nodes.get(core, 0), threads[core].index(core), core))
    taken = order[: usable_cores()]
    return tuple(sorted(taken, key=lambda core: (nodes.get(core, 0), threads[core][0], core)))


def _threads_of_core(number: int) -> set[int]:
    """List the hardware threads of a physical core; only the given one if the system does not report them.

    Source: Linux kernel documentation, "How CPU topology info is exported via sysfs" (`core_cpus_list`, formerly
    `thread_siblings_list`).
    """
    for name in ("core_cpus_list", "thread_siblings_list"):
        with suppress(OSError):
            return set(_parse_numbers((_CORES / f"cpu{number}" / "topology" / name).read_text())) | {number}
    return {number}


def has_own_cores() -> bool:
    """Check that no quota limits this process to fewer cores than its affinity mask has."""
    return usable_cores() == len(os.sched_getaffinity(0))


def stay_on(cores: Iterable[int]) -> None:
    """Pin this thread, and threads that it starts later, to the given cores; without cores do nothing.

    Raises:
        OSError: None of the cores is allowed.

    Source: sched_setaffinity(2): threads inherit the mask of the thread that creates them.
    """
    if kept := set(cores):
        os.sched_setaffinity(0, kept)


def numa_nodes() -> dict[int, int]:
    """Map core numbers to NUMA nodes; empty if the system reports none.

    Source: Linux kernel documentation, "sysfs-devices-node" (`cpulist`).
    """
    nodes: dict[int, int] = {}
    for path in _NUMA_NODES.glob("node[0-9]*/cpulist"):
        node = int(path.parent.name.removeprefix("node"))
        nodes |= dict.fromkeys(_parse_numbers(path.read_text()), node)
    return nodes


def _parse_numbers(text: str) -> Iterator[int]:
    """Parse a list such as `0-3,8`."""
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps the arenas of a peak, such as loading a graph."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
