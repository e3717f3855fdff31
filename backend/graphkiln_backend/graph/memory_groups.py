"""The memory limits of the control groups that this process is in, and what counts against them.

The kernel counts the cache of files, too, although it takes that back before it ends anybody: what was not read lately
is no memory that is used.
Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst; Kubernetes, "Node-pressure Eviction" (`workingSet`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.cgroups import CGROUPS, OWN_CGROUPS, own_groups, read_file

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Version of the interface -> files with the limit and with what was taken; the counter of what can be taken back."""
_COUNTERS = "memory.stat"
_UNLIMITED_BYTES = 1 << 60
"""What version 1 says where there is no limit is near 2^63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A group with a limit.

    Attributes:
        limit_bytes: What its processes may take together.
        used_bytes: What they have taken, less what the kernel takes back by itself: files that nobody read lately.
    """

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left."""
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
