"""Memory of a node and of a process, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Of a machine, or of the container that this process runs in.

    Attributes:
        used_bytes: What cannot be had without taking it from a process.
        total_bytes: What there is.
    """

    used_bytes: int
    total_bytes: int


def node_memory(cgroup: Path = _CGROUP) -> NodeMemory:
    """Of this container, where it is limited; else of the machine.

    Args:
        cgroup: Of this process. Source: Linux kernel documentation, "Control Group v2" (`memory.max`).
    """
    machine = psutil.virtual_memory()
    whole = NodeMemory(used_bytes=machine.total - machine.available, total_bytes=machine.total)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max" or int(limit) >= machine.total:
            return whole
        used = int((cgroup / "memory.current").read_text())
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return whole
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
