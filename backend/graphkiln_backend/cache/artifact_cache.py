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
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, LoweringError, ManifestError
from graphkiln_backend.graph.manifest import sha256_of

_log = logging.getLogger("graphkiln.cache")

_ENTRY = "entry.json"
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
GIB = 1 << 30
DEFAULT_LIMIT_BYTES = 20 * GIB

Key = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Size and SHA-256 of a file of an entry."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What `entry.json` says.

    Attributes:
        kind: What the artifact is: `graph`, `onnxruntime`, `openvino`, ...
        model: For people: what it was built for.
        key: Everything that it depends on.
        files: The artifact's files by name.
        seconds: Time that building it took.
    """

    kind: str
    model: str
    key: dict[str, str]
    files: dict[str, FileFacts] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """An entry as `graphkiln cache list` shows it: where it is, what it is, when it was last used (epoch seconds)."""

    path: Path
    entry: Entry
    used_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The artifact cache that somebody asks for.

    Attributes:
        folder: Where it lies; None for one that vanishes.
        limit_bytes: How large it may grow.
    """

    folder: Path | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def open(self, vanishing: Path) -> ArtifactCache:
        """Opens it.

        Args:
            vanishing: Where one that vanishes lies; the caller removes it.
        """
        lasting = self.folder is not None
        return ArtifactCache(self.folder or vanishing, limit_bytes=self.limit_bytes, lasting=lasting)


class ArtifactCache:
    """The cache, as one process uses it. Entries that it hands out stay until it is closed.

    Args:
        folder: Where it lies; made when missing.
        limit_bytes: Least recently used entries go when all are larger together.
        lasting: Whether it outlives the server that uses it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        lasting: bool = True,
    ) -> None:
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
        name = name_of(kind, key)
        if name not in self._paths:
            wanted = Entry(kind=kind, model=model, key=dict(key))
            try:
                self._paths[name] = self._get(name, wanted, build)
            except OSError as error:
                raise _explained(error, self.folder) from error
        return self._paths[name]

    def _get(self, name: str, wanted: Entry, build: Callable[[Path], None]) -> Path:
        path = self._entries / name
        try:
            self._make_folders()
            lock = (self._locks / name).open("a")
        except OSError as error:
            if error.errno in _READ_ONLY and self._fault(path, wanted) is None:
                return path  # mounted read-only, and filled ahead of time
            raise
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fault = self._fault(path, wanted) if path.exists() else ""
            if fault:
                _log.warning("discarded %s: %s", path, fault)
                self._discard(path)
            if fault is not None:
                self._build(path, wanted, build)
            used = self._held.enter_context((path / _ENTRY).open("rb"))
            fcntl.flock(used, fcntl.LOCK_SH)
            os.utime(self._locks / name)
        if fault is not None:
            try:
                self._prune(self._limit_bytes)
            except OSError as error:  # the entry is there: that others cannot be removed is no reason not to serve it
                _log.warning("cannot prune %s: %s", self.folder, error)
        return path

    def _discard(self, path: Path) -> None:
        """Takes an entry away at once; who has it open keeps what is open."""
        away = self._partial / f"{path.name}.discarded"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def _build(self, path: Path, wanted: Entry, build: Callable[[Path], None]) -> None:
        partial = self._partial / path.name
        shutil.rmtree(partial, ignore_errors=True)  # of a process that died while it built
        partial.mkdir()
        begun = time.monotonic()
        try:
            build(partial)
            files = {
                file.name: FileFacts(bytes=file.stat().st_size, sha256=sha256_of(file))
                for file in sorted(partial.iterdir())
            }
            entry = Entry(
                kind=wanted.kind,
                model=wanted.model,
                key=wanted.key,
                files=files,
                seconds=round(time.monotonic() - begun, 3),
            )
            (partial / _ENTRY).write_text(json.dumps(encode(entry), indent=2) + "\n")
            partial.rename(path)
        except LoweringError as error:
            if os.statvfs(partial).f_bavail == 0:  # a runtime that cannot write says so in its own words
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # where all went well it has another name now

    def entries(self) -> list[Listed]:
        """Every entry that can be read, the least recently used first."""
        found = []
        for path in self._entries.glob("*"):
            entry = _read(path)
            if entry is not None:
                found.append(Listed(path=path, entry=entry, used_s=self._used_s(path)))
        return sorted(found, key=lambda listed: listed.used_s)

    def _used_s(self, path: Path) -> float:
        lock = self._locks / path.name
        return (lock if lock.exists() else path).stat().st_mtime

    def faults(self) -> dict[Path, str]:
        """What is wrong with each entry that is damaged, by its folder."""
        faults = {}
        for path in sorted(self._entries.glob("*")):
            if fault := self._fault(path, None):
                faults[path] = fault
        return faults

    def prune(self, limit_bytes: int) -> list[Path]:
        """Removes the least recently used entries until the rest is no larger than a limit, and what dead builds left.

        Entries that somebody uses stay.

        Returns:
            What was removed.

        Raises:
            CacheError: The folder cannot be written.
        """
        try:
            return self._prune(limit_bytes)
        except OSError as error:
            raise _explained(error, self.folder) from error

    def _prune(self, limit_bytes: int) -> list[Path]:
        listed = self.entries()
        total = sum(each.entry.bytes for each in listed)
        removed = []
        for each in listed:
            if total <= limit_bytes:
                break
            if self._remove(each.path):
                total -= each.entry.bytes
                removed.append(each.path)
        self._make_folders()
        for left in (*self._partial.glob("*"), *self._entries.glob("*")):
            with _locked_alone(self._locks / left.name.removesuffix(".discarded"), "a") as alone:
                if alone and _read(left) is None:
                    shutil.rmtree(left, ignore_errors=True)
        return removed

    def _remove(self, path: Path) -> bool:
        """Removes an entry, unless somebody uses it; says whether it is gone."""
        try:
            with _locked_alone(self._locks / path.name, "a") as found, _locked_alone(path / _ENTRY, "r+b") as unused:
                if found and unused:
                    self._discard(path)
                return found and unused
        except FileNotFoundError:  # somebody else has removed it
            return False

    def close(self) -> None:
        """Gives all entries back."""
        self._held.close()
        self._paths.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_folders(self) -> None:
        for folder in (self._entries, self._locks, self._partial):
            folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def _fault(path: Path, wanted: Entry | None) -> str | None:
        """What is wrong with an entry, or None."""
        entry = _read(path)
        if entry is None:
            return f"{_ENTRY} cannot be read"
        if path.name != name_of(entry.kind, entry.key) or (wanted and entry.key != wanted.key):
            return "it was made for something else"
        for name, facts in entry.files.items():
            if Path(name).name != name:
                return f"'{name}' leads out of it"
            try:
                found = sha256_of(path / name)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if found != facts.sha256:
                return f"{name} is damaged: expected SHA-256 {facts.sha256[:12]}..., got {found[:12]}..."
        return None


def _read(path: Path) -> Entry | None:
    """What an entry's folder says that it is; None where it says nothing, or is just being removed."""
    try:
        return decode(Entry, json.loads((path / _ENTRY).read_bytes()))
    except (OSError, ValueError, ManifestError):
        return None


@contextmanager
def _locked_alone(path: Path, mode: str) -> Iterator[bool]:
    """Whether nobody else holds a lock on a file; nobody can take one until the end of the block."""
    lock: IO[Any]
    with path.open(mode) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def default_folder() -> Path:
    """Where the cache lies unless somebody says otherwise. Source: XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphkiln"


def name_of(kind: str, key: Key) -> str:
    """An entry's name: its kind, for people, and the digest of its key."""
    text = json.dumps({"kind": kind, **key}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _explained(error: OSError, folder: Path) -> CacheError:
    if error.errno in _FULL:
        hint = "make room (graphkiln cache prune), or choose another folder: serve --cache DIR"
        return CacheError(f"the artifact cache {folder} is full: {error.strerror}", hint=hint)
    hint = (
        "choose a folder that can be written (serve --cache DIR), or fill this one ahead of time "
        "(graphkiln lower), or do without (--cache off)"
    )
    return CacheError(f"the artifact cache {folder} cannot be written: {error.strerror}", hint=hint)
