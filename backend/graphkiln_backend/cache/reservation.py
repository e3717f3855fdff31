"""An entry of the artifact cache whose lock is held, and what a disk that fails means for it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphkiln_backend.cache.entry import Entry, FileRecord
from graphkiln_backend.cache.trust import close_to_others
from graphkiln_backend.graph.errors import CacheError, GraphkilnError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE_BYTES = 1 << 20


class Reservation:
    """An entry whose lock is held: nobody else looks for it or builds it meanwhile. See `ArtifactCache.reserve`.

    Args:
        cache: The cache's folder.
        entry: What is looked for; its folder need not be there.
        path: The entry's folder, or None where it is not there.
    """

    def __init__(self, cache: Path, entry: Entry, path: Path | None) -> None:
        self._cache = cache
        self._entry = entry
        self._path = path
        self._begun = time.monotonic()

    @property
    def path(self) -> Path | None:
        """The entry's folder, or None as long as it is not there. Stays until the cache is closed."""
        return self._path

    @contextmanager
    def write(self) -> Iterator[Path]:
        """An empty folder; what is in it at the end of the block is the entry, unless the block fails.

        Raises:
            CacheError: The entry cannot be written.
        """
        partial = self._cache / "partial" / self._entry.name
        with explained_errors(self._cache):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that died while it built
            partial.mkdir()
            try:
                yield partial
                self._path = self._keep(partial)
            except GraphkilnError:
                _check_writable(partial)  # a runtime that cannot write says so in its own words
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # where all went well it has another name now

    def _keep(self, partial: Path) -> Path:
        entry = Entry(
            kind=self._entry.kind,
            model=self._entry.model,
            key=self._entry.key,
            files={file.name: FileRecord.of(file) for file in sorted(partial.iterdir())},
            seconds=round(time.monotonic() - self._begun, 3),
        )
        entry.write(partial)
        close_to_others(partial)
        return partial.rename(self._cache / "entries" / entry.name)


@contextmanager
def explained_errors(folder: Path) -> Iterator[None]:
    """Says of a file system's error what it means for the cache, and what to do.

    Args:
        folder: The cache's folder.

    Raises:
        CacheError: There was one.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            hint = "make room (graphkiln cache prune), or choose another folder: serve --cache DIR"
            raise CacheError(f"the artifact cache {folder} is full: {error.strerror}", hint=hint) from error
        hint = (
            "choose a folder that can be written (serve --cache DIR), or fill this one ahead of time "
            "(graphkiln lower), or do without (--cache off)"
        )
        raise CacheError(
            f"the artifact cache {folder} cannot be written: {error.strerror or error}", hint=hint
        ) from error


def _check_writable(folder: Path) -> None:
    """Writes a little into a folder.

    Raises:
        OSError: It is full, over a quota, or gone.
    """
    if os.statvfs(folder).f_bavail == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (folder / "probe").write_bytes(bytes(_PROBE_BYTES))
