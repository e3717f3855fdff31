"""Memory of a node and of a process, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from graphkiln_backend.graph.cgroups import CGROUPS, OWN_CGROUPS
from graphkiln_backend.graph.memory_groups import memory_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Of a machine, or of a container, service or job that this process runs in.

    Attributes:
        used_bytes: What cannot be had without taking it from a process.
        total_bytes: What there is.
    """

    used_bytes: int
    total_bytes: int

    @property
    def share_used(self) -> float:
        """From 0 to 1."""
        return self.used_bytes / self.total_bytes


def node_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> NodeMemory:
    """Of the fullest container, service or job around this process, where one is limited; else of the machine.

    Args:
        cgroups: Where control groups are mounted.
        own: The kernel's file that names those of this process.
    """
    machine = psutil.virtual_memory()
    groups = [
        NodeMemory(used_bytes=group.used_bytes, total_bytes=group.limit_bytes)
        for group in memory_groups(cgroups, own)
        if group.limit_bytes < machine.total
    ]
    whole = NodeMemory(used_bytes=machine.total - machine.available, total_bytes=machine.total)
    return max(groups, key=lambda each: each.share_used, default=whole)


def process_memory(pid: int) -> int:
    """Bytes of a process, its part of what it shares with others (PSS); 0 when it is gone.

    Args:
        pid: The process. Source: proc(5), `smaps_rollup`.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
