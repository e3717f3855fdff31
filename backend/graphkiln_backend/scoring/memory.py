"""Memory of a node and of a process, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from graphkiln_backend.graph.cgroups import CGROUPS, OWN_CGROUPS, own_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Of a machine, or of the container that this process runs in.

    Attributes:
        used_bytes: What cannot be had without taking it from a process.
        total_bytes: What there is.
    """

    used_bytes: int
    total_bytes: int


def node_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> NodeMemory:
    """Of the container, service or job that this process runs in, where it is limited; else of the machine.

    Args:
        cgroups: Where control groups are mounted.
        own: The kernel's file that names those of this process.
    """
    machine = psutil.virtual_memory()
    whole = NodeMemory(used_bytes=machine.total - machine.available, total_bytes=machine.total)
    groups = (_read_group(folder) for folder, version in own_groups("memory", cgroups, own) if version == 2)
    return min((whole, *filter(None, groups)), key=lambda each: each.total_bytes)


def _read_group(folder: Path) -> NodeMemory | None:
    """None without a limit. Source: Linux kernel documentation, "Control Group v2" (`memory.max`)."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return NodeMemory(used_bytes=used - int(counters.get("inactive_file", 0)), total_bytes=int(limit))


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
