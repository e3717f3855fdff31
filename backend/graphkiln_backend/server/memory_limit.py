"""How much memory tritonserver itself may take (see `graphkiln_backend.triton.memory_limit`)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_LEAST_BYTES = 2 << 30
"""tritonserver starts with 0.8 GB of address space that counts."""
_SHARE = 2
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst."""


def default_limit() -> int:
    """Half of the memory that is free now, in bytes, but enough to serve at all."""
    return max(free_memory() // _SHARE, _LEAST_BYTES)


def free_memory() -> int:
    """Bytes that a new program could take, of the machine and of the container."""
    free = [_free_of_group(Path(limit), Path(used)) for limit, used in _GROUPS]
    return min([psutil.virtual_memory().available, *(size for size in free if size is not None)])


def _free_of_group(limit: Path, used: Path) -> int | None:
    with suppress(OSError, ValueError):  # no such group, or `max`
        return max(int(limit.read_text()) - int(used.read_text()), 0)
    return None
