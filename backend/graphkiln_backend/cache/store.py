"""Compiled artifacts in one content-addressed folder, so that the next start builds nothing.

An entry is a folder named by the SHA-256 of its key: everything that the artifact depends on (graph and weights,
engine, library versions, device, options, shapes). It holds the artifact's files and `entry.json`: the key itself, and
size and SHA-256 of each file. It appears by one rename, so that it is whole or not there, whatever is killed.

    FOLDER/entries/KEY/{entry.json, ...}     FOLDER/locks/KEY     FOLDER/partial/KEY

A process that looks for an entry or builds it holds its lock file for that time; the file's time is that of the last
use. A process that uses an entry holds a shared lock on its `entry.json`, which keeps it from being pruned. An entry is
never trusted: its key and checksums are compared at each use, and a damaged or foreign one is discarded and built
again.

A cache is a convenience: where it cannot be used (a full or failing disk, a read-only folder that lacks an entry), a
server uses its spare one in the temporary folder instead, and logs that once.
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

# One entry of the artifact cache: its name, `entry.json`, the check of its files, and how it is written.

ENTRY_FILE = "entry.json"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE_BYTES = 1 << 20

Key = Mapping[str, str]  # everything that an artifact depends on, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file of an entry."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file.

        Raises:
            OSError: It cannot be read.
        """
        return cls(bytes=path.stat().st_size, sha256=sha256_of(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The content of `entry.json`.

    Attributes:
        kind: Kind of the artifact: `graph`, `onnxruntime`, `openvino`, ...
        model: For people: the model.
        key: Everything that it depends on.
        files: The artifact's files by name.
        seconds: Time that building it took.
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
        """The name of its folder."""
        return entry_name(self.kind, self.key)

    def write(self, folder: Path) -> None:
        """Write `entry.json` into a folder.

        Raises:
            OSError: It cannot be written.
        """
        (folder / ENTRY_FILE).write_text(json.dumps(encode(self), indent=2) + "\n")


def entry_name(kind: str, key: Key) -> str:
    """Return the name of an entry's folder: its kind, for people, and the digest of kind and key."""
    text = json.dumps({"kind": kind, **key}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def read_entry(folder: Path) -> Entry | None:
    """Read `entry.json` of an entry's folder; None where it cannot be read, or is just being removed."""
    try:
        return decode(Entry, json.loads((folder / ENTRY_FILE).read_bytes()))
    except (OSError, ValueError, ManifestError):
        return None


def find_fault(folder: Path, key: Key | None = None) -> str | None:
    """Check an entry, and return its fault, or None.

    Args:
        folder: The entry's folder.
        key: The key that it must have been built for; None for that of its name.
    """
    entry = read_entry(folder)
    if entry is None:
        return f"{ENTRY_FILE} cannot be read"
    if folder.name != entry.name or (key is not None and entry.key != key):
        return "it was made for something else"
    try:
        distrust = find_distrust_inside(folder)
    except OSError as error:
        distrust = f"it cannot be read: {error.strerror}"
    return distrust or _find_damage(folder, entry)


def _find_damage(folder: Path, entry: Entry) -> str | None:
    for name, expected in entry.files.items():
        if Path(name).name != name:
            return f"'{name}' leads out of it"
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != expected.sha256:
            return f"{name} is damaged: expected SHA-256 {expected.sha256[:12]}..., got {found[:12]}..."
    return None


class Reservation:
    """An entry whose lock is held: no other process looks for it or builds it meanwhile. See `ArtifactCache.reserve`.

    Args:
        cache: The cache's folder.
        entry: The entry; its folder need not be there.
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
        """Make an empty folder, whose files at the end of the block are the entry, unless the block fails.

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
                _check_writable(partial)  # a runtime that cannot write fails with its own error
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # renamed where all went well

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
    """Turn an error of the file system into a `CacheError` of this folder that says what to do."""
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
    """Write a little into a folder; an OSError says that it is full, over a quota, or gone."""
    if os.statvfs(folder).f_bavail == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (folder / "probe").write_bytes(bytes(_PROBE_BYTES))


_log = logging.getLogger("graphkiln.cache")

GIB = 1 << 30
DEFAULT_LIMIT_BYTES = 20 * GIB
_LONG_S = 10.0  # of waiting for a lock; loading a small model takes less
_MAKE = os.O_RDWR | os.O_CREAT


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """An entry as `graphkiln cache list` shows it, with the time of its last use in epoch seconds."""

    path: Path
    entry: Entry
    used_s: float


class ArtifactCache(Closeable):
    """The cache, as one process uses it. Entries that it returned stay until it is closed. Not thread-safe.

    Args:
        folder: Its folder; made when missing.
        limit_bytes: Least recently used entries go when all are larger together.
        lasting: Whether it outlives the server that uses it.
        spare: A cache that vanishes, for what this one cannot hold; closed with it. None where that is an error.
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
        self._in_use = ExitStack()  # shared locks of the entries that were returned, until the cache is closed
        self._paths: dict[str, Path] = {}

    def get(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path:
        """Return the folder of an artifact, built when it is not there yet.

        Args:
            kind: Kind of the artifact.
            model: For people: the model.
            key: Everything that it depends on.
            build: Writes its files into an empty folder.

        Raises:
            CacheError: It is not there, and cannot be written.
        """
        try:
            return self._get(kind, model, key, build)
        except CacheError as error:
            return self._use_spare(error).get(kind, model, key, build)

    def get_lasting(self, kind: str, model: str, key: Key, build: Callable[[Path], None]) -> Path | None:
        """As `get`, but None where the artifact would not last and is not worth building.

        Raises:
            CacheError: It is not there, cannot be written, and there is no spare cache.
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
        """Return the spare cache, and log once in a run why it is used.

        Raises:
            CacheError: There is none.
        """
        if self._spare is None:
            raise error
        try:
            make_private(self._spare.folder)
            (self._spare.folder / "said").touch(exist_ok=False)
        except FileExistsError:  # by another instance of the run, or earlier
            return self._spare
        except OSError:
            pass
        _log.warning("served without the artifact cache: %s", error)
        return self._spare

    @contextmanager
    def reserve(self, kind: str, model: str, key: Key) -> Iterator[Reservation]:
        """Look for an artifact, and hold its lock until the end of the block, so that only one process builds it.

        Args:
            kind: Kind of the artifact.
            model: For people: the model.
            key: Everything that it depends on.

        Raises:
            CacheError: It is not there, and cannot be written.
        """
        with ExitStack() as building:
            try:
                reservation = building.enter_context(self._reserve(kind, model, key))
            except CacheError as error:
                reservation = building.enter_context(self._use_spare(error).reserve(kind, model, key))
            yield reservation

    def without_spare(self) -> ArtifactCache:
        """The same folder, for facts that need not be kept; closed by the caller."""
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
            yield reservation  # the caller may write here, which sets `path`
            if reservation.path:
                with explained_errors(self.folder):
                    self._keep_in_use(reservation.path)
        if reservation.path and not found:
            try:
                self._prune(self._limit_bytes)
            except OSError as error:  # the entry is there: that others cannot be removed is no reason not to serve it
                _log.warning("cannot prune %s: %s", self.folder, error)

    def _find(self, entry: Entry, building: ExitStack) -> Path | None:
        """The folder of an entry, or None where there is none; its build lock is kept until `building` is left."""
        path = self._entries / entry.name
        try:
            self._make_folders()
            file = building.enter_context((self._locks / entry.name).open("a"))
            holder = f"another process, or container, builds '{entry.name}' of the artifact cache"
            wait_for_lock(file, f"{entry.model} waits: {holder}")
        except OSError:
            if self._is_whole(path, entry):  # mounted read-only, and filled ahead of time
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
        """Check an entry without its build lock; keep it from being pruned where it can be used."""
        with suppress(OSError):  # a file system without locks
            self._keep_in_use(path)
        if find_fault(path, entry.key) is not None:
            self._paths.pop(entry.name, None)
            return False
        self._paths[entry.name] = path
        return True

    def _keep_in_use(self, path: Path) -> None:
        """Keep an entry from being pruned until the cache is closed."""
        if path.name in self._paths:
            return
        used = self._in_use.enter_context((path / ENTRY_FILE).open("rb"))
        lock_shared(used)
        with suppress(OSError):  # the time of use matters to pruning alone
            os.utime(self._locks / path.name)
        self._paths[path.name] = path

    def _discard(self, path: Path) -> None:
        """Take an entry away at once; processes that have it open keep their files."""
        away = self._partial / f"{path.name}.discarded"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def entries(self) -> list[StoredEntry]:
        """List every entry that can be read, the least recently used first."""
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
        """Check all entries, and return the fault of each damaged one by its folder."""
        paths = sorted(self._entries.glob("*"))
        return {path: fault for path in paths if (fault := find_fault(path))}

    def prune(self, limit_bytes: int) -> list[Path]:
        """Remove the least recently used entries until the rest is no larger than a limit, and what dead builds left.

        Entries in use stay.

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
        """Remove what dead builds left, as far as it can be; running builds keep theirs."""
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
        """Remove an entry unless it is in use; return whether it is gone."""
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
    """Return true for what a dead build or a damaged disk left; entries of other releases may have unknown fields."""
    try:
        document = json.loads((folder / ENTRY_FILE).read_bytes())
    except (OSError, ValueError):
        return True
    return not (isinstance(document, dict) and "kind" in document)


def wait_for_lock(file: IO[str], complaint: str, long_s: float = _LONG_S) -> None:
    """Lock a file; as long as another process holds it, wait.

    Args:
        file: Open for writing.
        complaint: Logged once where it takes long: a process that was stopped, or a container that was paused, keeps
            its locks.
        long_s: Seconds after which it is logged.

    Raises:
        OSError: Its file system has no locks.
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
