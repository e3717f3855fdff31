"""Compiled artifacts in one content-addressed folder, so that the next start builds nothing.

An entry is a folder named by the SHA-256 of its key: everything that the artifact depends on (graph and weights,
engine, library versions, device, options, shapes). It holds the artifact's files and `entry.json`: the key itself, and
size and SHA-256 of each file. It appears by one rename, so that it is whole or not there, whatever is killed.

    FOLDER/entries/KEY/{entry.json, ...}     FOLDER/locks/KEY     FOLDER/partial/KEY

Whoever looks for an entry or builds it holds its lock file for that time; the file's time is that of the last use.
Whoever uses an entry holds a shared lock on its `entry.json`, which keeps it from being pruned. The kernel takes a dead
process's locks away. Nobody trusts an entry: its key and checksums are compared at each use, and a damaged or foreign
one is discarded and built again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.cache.entry import ENTRY_FILE, Entry, FileRecord, Key, entry_name, find_fault, read_entry
from graphkiln_backend.cache.locks import locked_alone
from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.errors import CacheError, GraphkilnError

_log = logging.getLogger("graphkiln.cache")

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
GIB = 1 << 30
DEFAULT_LIMIT_BYTES = 20 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """An entry as `graphkiln cache list` shows it: where it is, what it is, when it was last used (epoch seconds)."""

    path: Path
    entry: Entry
    used_s: float


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
        with _explained_errors(self._cache):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that died while it built
            partial.mkdir()
            try:
                yield partial
                self._path = self._keep(partial)
            except GraphkilnError as error:
                if os.statvfs(partial).f_bavail == 0:  # a runtime that cannot write says so in its own words
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
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
        return partial.rename(self._cache / "entries" / entry.name)


class ArtifactCache(Closeable):
    """The cache, as one process uses it. Entries that it hands out stay until it is closed. Not thread-safe.

    Args:
        folder: Where it lies; made when missing.
        limit_bytes: Least recently used entries go when all are larger together.
        lasting: Whether it outlives the server that uses it.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES, lasting: bool = True) -> None:
        self.folder = folder
        self.lasting = lasting
        self._entries = folder / "entries"
        self._locks = folder / "locks"
        self._partial = folder / "partial"
        self._limit_bytes = limit_bytes
        self._held = ExitStack()
        self._paths: dict[str, Path] = {}

    def get(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path:
        """The folder of an artifact, built when it is not there yet.

        Args:
            kind: What it is.
            model: For people: what it is for.
            key: Everything that it depends on.
            build: Writes its files into an empty folder.

        Raises:
            CacheError: It is not there, and cannot be written.
        """
        with self.reserve(kind, model, key) as reservation:
            if reservation.path is None:
                with reservation.write() as folder:
                    build(folder)
        return self._paths[entry_name(kind, key)]

    @contextmanager
    def reserve(self, kind: str, model: str, key: Key) -> Iterator[Reservation]:
        """Looks for an artifact, and holds its lock until the end of the block, so that only one process builds it.

        Args:
            kind: What it is.
            model: For people: what it is for.
            key: Everything that it depends on.

        Raises:
            CacheError: It is not there, and cannot be written.
        """
        entry = Entry(kind=kind, model=model, key=dict(key))
        if entry.name in self._paths:
            yield Reservation(self.folder, entry, self._paths[entry.name])
            return
        with ExitStack() as locked:
            with _explained_errors(self.folder):
                found = self._find(entry, locked)
            reservation = Reservation(self.folder, entry, found)
            yield reservation
            if reservation.path:
                with _explained_errors(self.folder):
                    self._hold(reservation.path)
        if reservation.path and not found:
            try:
                self._prune(self._limit_bytes)
            except OSError as error:  # the entry is there: that others cannot be removed is no reason not to serve it
                _log.warning("cannot prune %s: %s", self.folder, error)

    def _find(self, entry: Entry, locked: ExitStack) -> Path | None:
        """The folder of an entry, or None where there is none; its lock is held until `locked` is left."""
        path = self._entries / entry.name
        try:
            self._make_folders()
            lock = locked.enter_context((self._locks / entry.name).open("a"))
        except OSError as error:
            if error.errno in _READ_ONLY and find_fault(path, entry.key) is None:
                self._paths[entry.name] = path  # mounted read-only, and filled ahead of time
                return path
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            return None
        if fault := find_fault(path, entry.key):
            _log.warning("discarded %s: %s", path, fault)
            self._discard(path)
            return None
        self._hold(path)
        return path

    def _hold(self, path: Path) -> None:
        """Keeps an entry from being pruned until the cache is closed."""
        if path.name in self._paths:
            return
        used = self._held.enter_context((path / ENTRY_FILE).open("rb"))
        fcntl.flock(used, fcntl.LOCK_SH)
        os.utime(self._locks / path.name)
        self._paths[path.name] = path

    def _discard(self, path: Path) -> None:
        """Takes an entry away at once; who has it open keeps what is open."""
        away = self._partial / f"{path.name}.discarded"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def entries(self) -> list[StoredEntry]:
        """Every entry that can be read, the least recently used first."""
        found = []
        for path in self._entries.glob("*"):
            entry = read_entry(path)
            if entry is not None:
                found.append(StoredEntry(path=path, entry=entry, used_s=self._used_s(path)))
        return sorted(found, key=lambda stored: stored.used_s)

    def _used_s(self, path: Path) -> float:
        lock = self._locks / path.name
        return (lock if lock.exists() else path).stat().st_mtime

    def faults(self) -> dict[Path, str]:
        """What is wrong with each entry that is damaged, by its folder."""
        paths = sorted(self._entries.glob("*"))
        return {path: fault for path in paths if (fault := find_fault(path))}

    def prune(self, limit_bytes: int) -> list[Path]:
        """Removes the least recently used entries until the rest is no larger than a limit, and what dead builds left.

        Entries that somebody uses stay.

        Returns:
            What was removed.

        Raises:
            CacheError: The folder cannot be written.
        """
        with _explained_errors(self.folder):
            return self._prune(limit_bytes)

    def _prune(self, limit_bytes: int) -> list[Path]:
        entries = self.entries()
        total = sum(stored.entry.bytes for stored in entries)
        removed = []
        for stored in entries:
            if total <= limit_bytes:
                break
            if self._remove(stored.path):
                total -= stored.entry.bytes
                removed.append(stored.path)
        self._make_folders()
        for left in (*self._partial.glob("*"), *self._entries.glob("*")):
            with locked_alone(self._locks / left.name.removesuffix(".discarded"), "a") as alone:
                if alone and read_entry(left) is None:
                    shutil.rmtree(left, ignore_errors=True)
        return removed

    def _remove(self, path: Path) -> bool:
        """Removes an entry, unless somebody uses it; says whether it is gone."""
        try:
            with (
                locked_alone(self._locks / path.name, "a") as found,
                locked_alone(path / ENTRY_FILE, "r+b") as unused,
            ):
                if found and unused:
                    self._discard(path)
                return found and unused
        except FileNotFoundError:  # somebody else has removed it
            return False

    def close(self) -> None:
        """Gives all entries back."""
        self._held.close()
        self._paths.clear()

    def _make_folders(self) -> None:
        for folder in (self._entries, self._locks, self._partial):
            folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _explained_errors(folder: Path) -> Iterator[None]:
    """Says of a file system's error what it means for the cache, and what to do.

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
        raise CacheError(f"the artifact cache {folder} cannot be written: {error.strerror}", hint=hint) from error
