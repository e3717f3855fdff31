"""A limit on the memory of tritonserver's own process, so that a small request cannot take all of the machine's.

For a request whose tensors are JSON, Triton (24.10) makes room for the shape before it looks at the data: a shape of
4294967296 in 60 bytes takes 16 GB, and whatever else runs on the machine is in the hands of the kernel's out-of-memory
killer. Beyond the limit the allocation fails, Triton ends, and the supervisor starts it again. It inflates a compressed
HTTP body without bound, too (1.5 MB became 1.5 GB in 2 s): that allocation fails with a response of 500, and the server
goes on. No option of Triton's changes either.

Graphs are not in that process but in the instances, which lift the limit for themselves when they start. The stacks of
its threads are, 8 MB of address space for each: 34 models with two instances have 2,472. The kernel counts them, so
the limit rises with their number.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.system.resources import memory_groups

_MEMORY = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
_LEAST_BYTES = 2 << 30
"""tritonserver starts with 0.8 GB of address space that counts."""
_SHARE = 2
_OWN_BYTES = 512 << 20
"""What tritonserver has besides stacks before it takes requests: 244 MB with one model, 256 MB with 34."""
_LOADING_BYTES = 4 << 30
"""Room for the threads that come between two looks while models load: 500 of them."""
_UNLIMITED_STACK = 8 << 20
"""Of a thread where the user has set no limit. Source: glibc's ARCH_STACK_DEFAULT_SIZE is less."""


class MemoryLimit:
    """Holds tritonserver to what it needs itself, the stacks of its threads, and some bytes more.

    Args:
        pid: The process.
        limit_bytes: How much more private writable memory it may take; 0 for any amount.
    """

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self._pid = pid
        self._limit_bytes = limit_bytes
        self._stack_bytes = _stack_size()
        self._users_bytes: int | None = None

    def follow(self, *, live: bool) -> None:
        """Sets the limit for the threads that there are now. A lower limit of the user's own stays.

        Args:
            live: Whether the server takes requests. Until then threads may come by the hundred.
        """
        if not self._limit_bytes:
            return
        with suppress(OSError, ValueError):  # it has just ended, or the system knows no such limit
            soft, hard = resource.prlimit(self._pid, resource.RLIMIT_DATA)
            self._users_bytes = soft if self._users_bytes is None else self._users_bytes
            room = self._limit_bytes if live else max(self._limit_bytes, _LOADING_BYTES)
            needed = _OWN_BYTES + room + self._stacks()
            if self._users_bytes == resource.RLIM_INFINITY or needed < self._users_bytes:
                resource.prlimit(self._pid, resource.RLIMIT_DATA, (needed, hard))

    def _stacks(self) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        threads = next((int(line.split()[1]) for line in lines if line.startswith("Threads:")), 0)
        return threads * self._stack_bytes


def _stack_size() -> int:
    """Bytes of a new thread's stack. Source: pthread_attr_init(3)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft


def default_limit() -> int:
    """Half of the memory that is free now, in bytes, but enough to serve at all."""
    return max(free_memory() // _SHARE, _LEAST_BYTES)


def free_memory() -> int:
    """Bytes that a new program could take, of the machine and of the container. Source: proc(5), /proc/meminfo."""
    lines = map(str.split, _MEMORY.read_text().splitlines())
    available = next(int(line[1]) << 10 for line in lines if line[0] == _AVAILABLE)
    return min([available, *(group.free_bytes for group in memory_groups())])
