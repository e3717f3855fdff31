"""The memory limits of the control groups that this process is in: a container's, and those around it.

Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_VERSION_2 = ("memory.max", "memory.current")
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


def memory_groups(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> list[MemoryGroup]:
    """The groups that limit the memory of this process, itself or through a group around its own.

    Args:
        cgroups: Where they are mounted.
        own: The kernel's file that names those of this process.
    """
    found = (_read_group(folder, names) for folder, names in _folders(cgroups, own))
    return [group for group in found if group]


def _folders(cgroups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of groups, and the names of their files for limit and use."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # a system without groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = cgroups, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _VERSION_1
        else:
            continue
        folder = root / path.lstrip("/")
        yield from ((place, names) for place in (folder, *folder.parents) if place.is_relative_to(root))


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
