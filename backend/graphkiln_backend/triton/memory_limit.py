"""A limit on the memory of tritonserver's own process, so that a small request cannot take all of the machine's.

For a request whose tensors are JSON, Triton (24.10) makes room for the shape before it looks at the data: a shape of
4294967296 in 60 bytes takes 16 GB, and whatever else runs on the machine is in the hands of the kernel's out-of-memory
killer. Beyond the limit the allocation fails, Triton ends, and the supervisor starts it again. It inflates a compressed
HTTP body without bound, too (1.5 MB became 1.5 GB in 2 s): that allocation fails with a response of 500, and the server
goes on. No option of Triton's changes either.

Graphs are not in that process but in the instances, which lift the limit for themselves when they start.
"""

from __future__ import annotations

import resource
from contextlib import suppress


def limit_memory(limit_bytes: int) -> None:
    """Limits this process, and what it starts; the user's own limit wins if lower.

    Args:
        limit_bytes: Of private writable memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > limit_bytes:
        _set_limit(limit_bytes, hard)


def lift_memory_limit() -> None:
    """Lifts the limit for this process, as far as the user's own goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    _set_limit(hard, hard)


def _set_limit(soft: int, hard: int) -> None:
    with suppress(OSError, ValueError):  # a system that knows no such limit is served without it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
