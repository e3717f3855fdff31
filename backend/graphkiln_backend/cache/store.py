"""Content-addressed cache of compiled artifacts, so that the next start builds nothing.

An entry is a folder named by the SHA-256 of its key: everything that the artifact depends on (graph and weights,
engine, library versions, device, options, shapes). It has the artifact's files and `entry.json` with the key and the
size and SHA-256 of each file. It is created by one rename, so that a killed process never leaves half an entry.

    FOLDER/entries/KEY/{entry.json, ...}     FOLDER/locks/KEY     FOLDER/partial/KEY

A process holds the lock file of an entry while it looks it up or builds it; the modification time of the lock file is
the time of the last use. A shared lock on `entry.json` protects an entry in use from pruning. Entries are never
trusted: key and checksums are verified at each use, and damaged or foreign entries are discarded and rebuilt.

If the cache cannot be used (a full or failing disk, a read-only folder without the entry), a server uses a spare cache
in its temporary folder, and logs that once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from graphkiln_backend.cache.trust import close_to_others, find_distrust_inside, make_private
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, GraphkilnError, ManifestError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import lock, lock_shared, locked, try_lock

ENTRY_FILE = "entry.json"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE_BYTES = 1 << 20

Key = Mapping[str, str]  # everything that an artifact depends on, by name
_log = logging.getLogger("graphkiln.cache")
GIB = 1 << 30
DEFAULT_LIMIT_BYTES = 20 * GIB
_LONG_S = 10.0  # wait for a lock after which it is logged; loading a small model takes less
_MAKE = os.O_RDWR | os.O_CREAT


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file of an entry."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Compute the record of a file.

        Raises:
            OSError: The file cannot be read.
        """
        return cls(bytes=path.stat().st_size, sha256=sha256_of(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Content of `entry.json`.

    Attributes:
        kind: Kind of the artifact: `graph`, `onnxruntime`, `openvino`, ...
        model: Name of the model, for people.
        key: Everything that the artifact depends on.
        files: Files of the artifact by name.
        seconds: Build time.
    """

    kind: str
    model: str
    key: dict[str, str]
    files: dict[str, FileRecord] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def name(self) -> str:
        """Name of its folder."""
        return entry_name(self.kind, self.key)

    def write(self, folder: Path) -> None:
        """Write `entry.json` into a folder.

        Raises:
            OSError: The file cannot be written.
        """
        (folder / ENTRY_FILE).write_text(json.dumps(encode(self), indent=2) + "\n")


def entry_name(kind: str, key: Key) -> str:
    """Return the folder name of an entry: its kind and a digest of kind and key."""
    text = json.dumps({"kind": kind, **key}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def read_entry(folder: Path) -> Entry | None:
    """Read `entry.json` of an entry's folder, or return None if it is unreadable or being removed."""
    try:
        return decode(Entry, json.loads((folder / ENTRY_FILE).read_bytes()))
    except (OSError, ValueError, ManifestError):
        return None


def find_fault(folder: Path, key: Key | None = None) -> str | None:
    """Verify an entry, and return its fault or None.

    Args:
        folder: The entry's folder.
        key: Expected key; None to check only that the key fits the folder name.
    """
    entry = read_entry(folder)
    if entry is None:
        return f"{ENTRY_FILE} cannot be read"
    if folder.name != entry.name or (key is not None and entry.key != key):
        return "its key does not match"
    try:
        distrust = find_distrust_inside(folder)
    except OSError as error:
        distrust = f"the entry cannot be read: {error.strerror}"
    return distrust or _find_damage(folder, entry)


def _find_damage(folder: Path, entry: Entry) -> str | None:
    for name, expected in entry.files.items():
        if Path(name).name != name:
            return f"'{name}' is outside of the entry"
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != expected.sha256:
            return f"{name} is damaged: expected SHA-256 {expected.sha256[:12]}..., got {found[:12]}..."
    return None


class Reservation:
    """An entry whose lock is held, so that no other process looks it up or builds it. See `ArtifactCache.reserve`.

    Args:
        cache: Folder of the cache.
        entry: The entry.
        path: Folder of the entry, or None if it does not exist yet.
    """

    def __init__(self, cache: Path, entry: Entry, path: Path | None) -> None:
        self._cache = cache
        self._entry = entry
        self._path = path
        self._begun = time.monotonic()

    @property
    def path(self) -> Path | None:
        """Folder of the entry, or None until it exists. Protected from pruning until the cache is closed."""
        return self._path

    @contextmanager
    def write(self) -> Iterator[Path]:
        """Yield an empty folder, which becomes the entry at the end of the block unless the block fails.

        Raises:
            CacheError: The entry cannot be written.
        """
        partial = self._cache / "partial" / self._entry.name
        with explained_errors(self._cache):
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that died during the build
            partial.mkdir()
            try:
                yield partial
                self._path = self._keep(partial)
            except GraphkilnError:
                _check_writable(partial)  # an engine that cannot write fails with its own error
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # already renamed after success

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
    """Turn file system errors into a `CacheError` with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            hint = "free disk space (graphkiln cache prune), or choose another folder: serve --cache DIR"
            raise CacheError(f"the artifact cache {folder} is full: {error.strerror}", hint=hint) from error
        hint = (
            "choose a writable folder (serve --cache DIR), fill this one ahead of time (graphkiln lower), or use no "
            "cache (--cache off)"
        )
        raise CacheError(
            f"the artifact cache {folder} cannot be written: {error.strerror or error}", hint=hint
        ) from error


def _check_writable(folder: Path) -> None:
    """Write a probe file; raises OSError if the disk is full, over quota, or the folder is gone."""
    if os.statvfs(folder).f_bavail == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (folder / "probe").write_bytes(bytes(_PROBE_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """An entry for `graphkiln cache list`, with the time of its last use in epoch seconds."""

    path: Path
    entry: Entry
    used_s: float


class ArtifactCache(Closeable):
    """Artifact cache of one process. Returned entries are protected until it is closed. Not thread-safe.

    Args:
        folder: Folder of the cache; created if missing.
        limit_bytes: Total size above which the least recently used entries are removed.
        lasting: False for a cache that is deleted with the server.
        spare: Temporary cache to use when this one fails; closed with it. None to raise the error.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        lasting: bool = True,
        spare: ArtifactCache | None = None,
    ) -> None:
        self.folder = folder
        self.lasting = lasting
        self._spare = spare
        self._entries = folder / "entries"
        self._locks = folder / "locks"
        self._partial = folder / "partial"
        self._limit_bytes = limit_bytes
        self._in_use = ExitStack()  # shared locks of returned entries
        self._paths: dict[str, Path] = {}

    def get(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path:
        """Return the folder of an artifact, and build it if it is missing.

        Args:
            kind: Kind of the artifact.
            model: Name of the model, for people.
            key: Everything that the artifact depends on.
            build: Writes its files into an empty folder.

        Raises:
            CacheError: The artifact is missing and cannot be written.
        """
        try:
            return self._get(kind, model, key, build)
        except CacheError as error:
            return self._use_spare(error).get(kind, model, key, build)

    def get_lasting(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path | None:
        """Like `get`, but return None instead of building the artifact in a temporary cache.

        Raises:
            CacheError: The artifact is missing and cannot be written, and there is no spare cache.
        """
        if not self.lasting:
            return None
        try:
            return self._get(kind, model, key, build)
        except CacheError as error:
            self._use_spare(error)
            return None

    def _get(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path:
        with self._reserve(kind, model, key) as reservation:
            if reservation.path is None:
                with reservation.write() as folder:
                    build(folder)
        return self._paths[entry_name(kind, key)]

    def _use_spare(self, error: CacheError) -> ArtifactCache:
        """Return the spare cache, and log the reason once per run.

        Raises:
            CacheError: There is no spare cache.
        """
        if self._spare is None:
            raise error
        try:
            make_private(self._spare.folder)
            (self._spare.folder / "said").touch(exist_ok=False)
        except FileExistsError:  # already logged, by this or another instance
            return self._spare
        except OSError:
            pass
        _log.warning("served without the artifact cache: %s", error)
        return self._spare

    @contextmanager
    def reserve(self, kind: str, model: str, key: Key) -> Iterator[Reservation]:
        """Look up an artifact, and hold its lock for the block, so that only one process builds it.

        Args:
            kind: Kind of the artifact.
            model: Name of the model, for people.
            key: Everything that the artifact depends on.

        Raises:
            CacheError: The artifact is missing and cannot be written.
        """
        with ExitStack() as building:
            try:
                reservation = building.enter_context(self._reserve(kind, model, key))
            except CacheError as error:
                reservation = building.enter_context(self._use_spare(error).reserve(kind, model, key))
            yield reservation

    def without_spare(self) -> ArtifactCache:
        """Open the same folder without the spare cache, for facts that need not be cached; closed by the caller."""
        return ArtifactCache(self.folder, limit_bytes=self._limit_bytes, lasting=self.lasting)

    @contextmanager
    def _reserve(self, kind: str, model: str, key: Key) -> Iterator[Reservation]:
        entry = Entry(kind=kind, model=model, key=dict(key))
        if entry.name in self._paths:
            yield Reservation(self.folder, entry, self._paths[entry.name])
            return
        with ExitStack() as building:
            with explained_errors(self.folder):
                found = self._find(entry, building)
            reservation = Reservation(self.folder, entry, found)
            yield reservation  # the caller may write the entry, which sets `path`
            if reservation.path:
                with explained_errors(self.folder):
                    self._keep_in_use(reservation.path)
        if reservation.path and not found:
            try:
                self._prune(self._limit_bytes)
            except OSError as error:  # the new entry can be used all the same
                _log.warning("cannot prune %s: %s", self.folder, error)

    def _find(self, entry: Entry, building: ExitStack) -> Path | None:
        """Return the folder of an entry, or None if it is missing; `building` keeps its lock."""
        path = self._entries / entry.name
        try:
            self._make_folders()
            file = building.enter_context((self._locks / entry.name).open("a"))
            holder = f"another process or container that builds '{entry.name}' of the artifact cache"
            wait_for_lock(file, f"{entry.model} waits for {holder}")
        except OSError:
            if self._is_whole(path, entry):  # a read-only mount that was filled ahead of time
                return path
            raise
        if not path.exists():
            return None
        if fault := find_fault(path, entry.key):
            _log.warning("discarded %s: %s", path, fault)
            self._discard(path)
            return None
        self._keep_in_use(path)
        return path

    def _is_whole(self, path: Path, entry: Entry) -> bool:
        """Verify an entry without its build lock, and protect it from pruning if possible."""
        with suppress(OSError):  # a file system without locks
            self._keep_in_use(path)
        if find_fault(path, entry.key) is not None:
            self._paths.pop(entry.name, None)
            return False
        self._paths[entry.name] = path
        return True

    def _keep_in_use(self, path: Path) -> None:
        """Protect an entry from pruning until the cache is closed."""
        if path.name in self._paths:
            return
        used = self._in_use.enter_context((path / ENTRY_FILE).open("rb"))
        lock_shared(used)
        with suppress(OSError):  # the time of use matters only to pruning
            os.utime(self._locks / path.name)
        self._paths[path.name] = path

    def _discard(self, path: Path) -> None:
        """Remove an entry atomically; processes with open files keep them."""
        away = self._partial / f"{path.name}.discarded"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def entries(self) -> list[StoredEntry]:
        """List all readable entries, the least recently used first."""
        found = []
        for path in self._entries.glob("*"):
            entry = read_entry(path)
            with suppress(FileNotFoundError):  # removed meanwhile
                if entry is not None:
                    found.append(StoredEntry(path=path, entry=entry, used_s=self._used_s(path)))
        return sorted(found, key=lambda stored: stored.used_s)

    def _used_s(self, path: Path) -> float:
        try:
            return (self._locks / path.name).stat().st_mtime
        except FileNotFoundError:  # filled elsewhere, and copied
            return path.stat().st_mtime

    def faults(self) -> dict[Path, str]:
        """Verify all entries, and return the faults of damaged ones by folder."""
        paths = sorted(self._entries.glob("*"))
        return {path: fault for path in paths if (fault := find_fault(path))}

    def prune(self, limit_bytes: int) -> list[Path]:
        """Remove the least recently used entries until the rest fits a limit, and the remains of dead builds.

        Entries in use are kept.

        Returns:
            Removed folders.

        Raises:
            CacheError: The folder cannot be written.
        """
        with explained_errors(self.folder):
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
        self._remove_unfinished()
        return removed

    def remove_unfinished(self) -> None:
        """Remove the remains of dead builds, as far as possible; running builds are not touched."""
        with suppress(OSError):
            if self.folder.is_dir():
                self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        self._make_folders()
        for left in (*self._partial.glob("*"), *self._entries.glob("*")):
            with locked(self._locks / left.name.removesuffix(".discarded"), _MAKE) as alone:
                if alone and (left.parent == self._partial or _is_left_over(left)):
                    shutil.rmtree(left, ignore_errors=True)

    def _remove(self, path: Path) -> bool:
        """Remove an entry unless it is in use; return true if it was removed."""
        try:
            with (
                locked(self._locks / path.name, _MAKE) as found,
                locked(path / ENTRY_FILE, os.O_RDWR) as unused,
            ):
                if found and unused:
                    self._discard(path)
                return found and unused
        except FileNotFoundError:  # removed by another process
            return False

    def close(self) -> None:
        """Release all entries."""
        self._in_use.close()
        self._paths.clear()
        if self._spare:
            self._spare.close()

    def _make_folders(self) -> None:
        for folder in (self._entries, self._locks, self._partial):
            make_private(folder)


def _is_left_over(folder: Path) -> bool:
    """Return true for a folder without a valid entry; entries of other releases may have unknown fields."""
    try:
        document = json.loads((folder / ENTRY_FILE).read_bytes())
    except (OSError, ValueError):
        return True
    return not (isinstance(document, dict) and "kind" in document)


def wait_for_lock(file: IO[str], complaint: str, long_s: float = _LONG_S) -> None:
    """Lock a file, waiting for other processes.

    Args:
        file: File, open for writing.
        complaint: Message to log after a long wait: a stopped process or paused container keeps its locks.
        long_s: Seconds after which to log it.

    Raises:
        OSError: The file system does not support locks.
    """
    if try_lock(file):
        return
    timer = threading.Timer(long_s, _log.info, (complaint,))
    timer.daemon = True
    timer.start()
    try:
        lock(file)
    finally:
        timer.cancel()
