"""One optimized copy of a graph on disk, from which all instances of a model map their weights.

Instances are processes. Each would hold the weights again, and hold them twice where the runtime repacks them for its
kernels. An optimized copy with its repacked weights in a file of their own is mapped instead: the pages are shared.
Seen with ResNet-50 and two instances: 281 MB of memory each without, 104 MB with; loading takes 0.01 s instead of 1 s.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from graphkiln_backend.system.closing import Closeable

_GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"


class SharedWeights(Closeable):
    """The shared copy of a graph: written by the first process that needs it, removed by the last that closes it.

    Args:
        folder: Where copies live: on this machine and for this run only, since they may fit its processor alone.
        graph_path: The graph; a change of it or of a file beside it makes a new copy.
        options: Everything else that the copy depends on.
        save: Writes the copy to a path, and its weights to `WEIGHTS` beside it.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, graph_path: Path, options: str, save: Callable[[Path], None]) -> None:
        self._target = folder / _key(graph_path, options)
        self._lock = folder / f"{self._target.name}.lock"
        with self._locked():
            if not self._target.exists():
                partial = self._target.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that died while it wrote
                try:
                    partial.mkdir()
                    save(partial / _GRAPH)
                    partial.rename(self._target)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
                    raise
            # A process that dies releases its lock: nobody need count users.
            self._use = (self._target / _GRAPH).open("rb")
            fcntl.flock(self._use, fcntl.LOCK_SH)

    @property
    def path(self) -> Path:
        """The graph of the copy."""
        return self._target / _GRAPH

    def close(self) -> None:
        """Releases the copy. Call it once."""
        with self._locked(), self._use:
            try:
                fcntl.flock(self._use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            shutil.rmtree(self._target)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _key(graph_path: Path, options: str) -> str:
    """Names a copy by the graph's folder (every file's name, size and time of change) and the options."""
    digest = hashlib.sha256(options.encode())
    for path in sorted(graph_path.resolve().parent.rglob("*")):
        facts = path.stat() if path.exists() else path.lstat()  # a link that leads nowhere is no reason not to share
        digest.update(f"{path!a}|{facts.st_size}|{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
