"""How many cores this process may really use: affinity and cgroup quota, not what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")
_NUMA_NODES = Path("/sys/devices/system/node")


def usable_cores() -> int:
    """Number of cores, at least 1: the smaller of the affinity mask and the cgroup's CPU quota, rounded up."""
    affinity = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """CPU quota in cores, or None where there is none.

    Source: Linux kernel documentation, "Control Group v2" (`cpu.max`) and "CFS Bandwidth Control" (v1).
    """
    try:
        if _CGROUP_V2.exists():
            quota, period = _CGROUP_V2.read_text().split()
        else:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text()
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text()
    except OSError:
        return None
    if quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)


def usable_core_numbers() -> tuple[int, ...]:
    """The cores that this process may use by number, those of a NUMA node behind each other; as many as are usable."""
    nodes = numa_nodes()
    ordered = sorted(os.sched_getaffinity(0), key=lambda core: (nodes.get(core, 0), core))
    return tuple(ordered[: usable_cores()])


def numa_nodes() -> dict[int, int]:
    """The NUMA node of each core by number; empty where the system tells of none.

    Source: Linux kernel documentation, "sysfs-devices-node" (`cpulist`).
    """
    found: dict[int, int] = {}
    for path in _NUMA_NODES.glob("node[0-9]*/cpulist"):
        node = int(path.parent.name.removeprefix("node"))
        for span in filter(None, path.read_text().strip().split(",")):
            first, _, last = span.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), node)
    return found
