"""What the processes of all instances take, held to what is here before a server is started: hundreds are many."""

from __future__ import annotations

import logging

from graphkiln_backend.graph.files import format_size
from graphkiln_backend.server.file_limit import check_files
from graphkiln_backend.server.memory_limit import free_memory
from graphkiln_backend.server.thread_limit import check_threads

_log = logging.getLogger("graphkiln.server")

INSTANCE_BYTES = 45 << 20
"""What the process of an instance takes beside its graph: 42 to 49 MB, see docs/operations.md."""


def check_instances(instances: int) -> None:
    """Refuses what would end in the middle of a start, and says so where memory will be short.

    Args:
        instances: Of all models; 0 where nobody knows.

    Raises:
        ServerSetupError: They need more threads or open files than may be had.
    """
    check_threads(instances)
    check_files(instances)
    needed, free = instances * INSTANCE_BYTES, free_memory()
    if needed > free:
        _log.warning(
            "%d model instances take %s beside their graphs, and %s of memory are free: the kernel may end some",
            instances,
            format_size(needed),
            format_size(free),
        )
