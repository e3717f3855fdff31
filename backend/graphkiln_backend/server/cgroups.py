"""The memory limits of the control groups that this process is in.

Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.cgroups import CGROUPS, OWN_CGROUPS, own_groups

_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""Version of the interface -> names of the files with the limit, and with what is used."""
_UNLIMITED_BYTES = 1 << 60
"""What version 1 says where there is no limit is near 2^63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A group with a limit.

    Attributes:
        limit_bytes: What its processes may take together.
        used_bytes: What they have taken, the system's cache of their files included.
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
    found = (_read_group(folder, _FILES[version]) for folder, version in own_groups("memory", cgroups, own))
    return [group for group in found if group]


def _read_group(folder: Path, names: tuple[str, str]) -> MemoryGroup | None:
    limit, used = (_read_bytes(folder / name) for name in names)
    if not limit or limit >= _UNLIMITED_BYTES:
        return None
    return MemoryGroup(limit_bytes=limit, used_bytes=used or 0)


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such group: a container sees its own as the root
        return None
    return int(text) if text.isdecimal() else None
