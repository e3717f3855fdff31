"""What one model instance tells the supervisor: what it serves with, and whether it is computing right now.

An instance is a process of its own. It writes one small JSON file when it is ready, and keeps two counters (batches
begun, batches ended) in a memory-mapped file beside it, so that the supervisor can see from outside, at any time and
without a message, whether a batch is in flight.
"""

from __future__ import annotations

import json
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.triton.environment import instances_folder

_COUNTERS = struct.Struct("=qq")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceStatus:
    """What an instance serves with.

    Attributes:
        pid: Process of the instance.
        model: Model name.
        version: Model version.
        engine: Engine that runs the graph.
        device: Where it runs.
        precision: Precision that was read back from the engine.
        nodes: Number of executed nodes by executor; empty where they could not be read.
        products: Number of executed convolutions and matrix products by element type.
        threads: Threads inside one operator.
        load_ms: Milliseconds from the start of loading until the instance was proven and ready.
        warmup_ms: Milliseconds of it for warming up.
        self_test: Verdict line of the golden samples, or empty.
        self_test_error: Relative L2 error on the golden samples, or -1.
        fallbacks: How many session configurations of the plan failed before the one that serves.
    """

    pid: int
    model: str
    version: int
    engine: str
    device: str
    precision: str
    nodes: dict[str, int]
    products: dict[str, int]
    threads: int
    load_ms: float
    warmup_ms: float
    self_test: str
    self_test_error: float
    fallbacks: int


class BatchCounters:
    """Counts the batches that an instance has begun and ended, where the supervisor can read it.

    Put `with counters:` around each batch; an exception ends the batch, too. Close it when the instance ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _write_whole(path, _COUNTERS.pack(0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTERS.size)
        self._begun = 0

    def __enter__(self) -> Self:
        """Marks the beginning of a batch."""
        self._begun += 1
        _COUNTERS.pack_into(self._memory, 0, self._begun, self._begun - 1)
        return self

    def __exit__(self, *_: object) -> None:
        """Marks the end of the batch."""
        _COUNTERS.pack_into(self._memory, 0, self._begun, self._begun)

    def close(self) -> None:
        """Removes the file."""
        self._memory.close()
        self._path.unlink(missing_ok=True)


class StatusFile(Closeable):
    """The instance's side: publishes its status, and removes it when it is closed.

    Attributes:
        computing: The instance's counters.
    """

    def __init__(self, folder: Path, instance: str, status: InstanceStatus) -> None:
        # An instance that is being unloaded may end after its successor of the same name has begun.
        name = f"{instance}.{status.pid}"
        self.computing = BatchCounters(folder / f"{name}.counters")
        self._path = folder / f"{name}.json"
        _write_whole(self._path, json.dumps(encode(status)).encode())  # last: whoever sees it finds the counters

    @classmethod
    def publish(cls, instance: str, status: InstanceStatus) -> Self | None:
        """Publishes under the supervisor's folder; None when no supervisor started this server."""
        folder = instances_folder()
        return cls(folder, instance, status) if folder else None

    def close(self) -> None:
        """Removes the files: the instance no longer serves."""
        self._path.unlink(missing_ok=True)
        self.computing.close()


def read_statuses(folder: Path) -> list[InstanceStatus]:
    """All instances that are ready, by name."""
    statuses = []
    for path in sorted(folder.glob("*.json")):
        with suppress(FileNotFoundError):  # removed between the listing and the reading: unloaded
            statuses.append(decode(InstanceStatus, json.loads(path.read_bytes())))
    return statuses


def read_counters(folder: Path) -> dict[str, tuple[int, int]]:
    """Batches `(begun, ended)` by `instance.pid`; an instance is computing while the two differ."""
    counters: dict[str, tuple[int, int]] = {}
    for path in sorted(folder.glob("*.counters")):
        with suppress(FileNotFoundError):
            begun, ended = _COUNTERS.unpack(path.read_bytes())
            counters[path.stem] = (begun, ended)
    return counters


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file and renames it into place: the supervisor never reads half of one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.rename(path)
