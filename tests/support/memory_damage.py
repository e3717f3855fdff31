"""Overwrite weights in the memory of a running process, as a memory fault would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def weights_of(graph_path: Path) -> list[bytes]:
    """Bytes of every weight of a graph that is too long to occur in memory by chance."""
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(graph_path).graph.initializer]
    return [array.tobytes() for array in arrays if array.dtype == np.float32 and array.size > 4]


def damage(pid: int, patterns: list[bytes]) -> int:
    """Reverse weights wherever a process has them; return how many were found."""
    found = 0
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in _writable(maps):
            memory.seek(start)
            try:
                content = memory.read(end - start)
            except OSError:
                continue
            for pattern in patterns:
                at = content.find(pattern)
                while at >= 0:
                    memory.seek(start + at)
                    memory.write(np.frombuffer(pattern, np.float32)[::-1].tobytes())
                    found += 1
                    at = content.find(pattern, at + 1)
    return found


def _writable(maps: list[str]) -> Iterator[tuple[int, int]]:
    for line in maps:
        addresses, permissions, *_ = line.split()
        if permissions.startswith("rw"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
