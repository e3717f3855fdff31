"""One entry of the artifact cache: its name, `entry.json`, the check of its files, and how it is written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.cache.trust import close_to_others, find_distrust_inside
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, GraphkilnError, ManifestError
from graphkiln_backend.graph.manifest import sha256_of

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
