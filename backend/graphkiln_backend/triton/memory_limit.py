"""A limit on the memory of tritonserver's own process, so that a small request cannot take all of the machine's.

For a request whose tensors are JSON, Triton (24.10) makes room for the shape before it looks at the data: a shape of
4294967296 in 60 bytes takes 16 GB, and whatever else runs on the machine is in the hands of the kernel's out-of-memory
killer. Beyond the limit the allocation fails, Triton ends, and the supervisor starts it again.

Graphs are not in that process but in the instances, which lift the limit for themselves when they start.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress

_SHARE = 0.5


def limit_memory() -> None:
    """Limits this process, and what it starts, to half of the machine's memory; the user's own limit wins if lower."""
    share = int(_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > share:
        _set_limit(share, hard)


def lift_memory_limit() -> None:
    """Lifts the limit for this process, as far as the user's own goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    _set_limit(hard, hard)


def _set_limit(soft: int, hard: int) -> None:
    with suppress(OSError, ValueError):  # a system that knows no such limit is served without it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
