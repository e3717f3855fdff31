"""The control groups that this process is in: that of a container, a service or a job, and those around it.

Source: the kernel's cgroup-v2.rst; cgroups(7), `/proc/PID/cgroup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
