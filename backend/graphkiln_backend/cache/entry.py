"""One entry of the artifact cache: its name, what `entry.json` says of it, and what is wrong with it.

Nobody trusts an entry: its key and checksums are compared at each use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.cache.trust import find_distrust_inside
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import sha256_of

ENTRY_FILE = "entry.json"

Key = Mapping[str, str]
"""Everything that an artifact depends on, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file of an entry."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Reads a file.

        Raises:
            OSError: It cannot be read.
        """
        return cls(bytes=path.stat().st_size, sha256=sha256_of(path))


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
        """Writes `entry.json` into a folder.

        Raises:
            OSError: It cannot be written.
        """
        (folder / ENTRY_FILE).write_text(json.dumps(encode(self), indent=2) + "\n")


def entry_name(kind: str, key: Key) -> str:
    """The name of an entry's folder: its kind, for people, and the digest of kind and key."""
    text = json.dumps({"kind": kind, **key}, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def read_entry(folder: Path) -> Entry | None:
    """What an entry's folder says that it is; None where it says nothing, or is just being removed."""
    try:
        return decode(Entry, json.loads((folder / ENTRY_FILE).read_bytes()))
    except (OSError, ValueError, ManifestError):
        return None


def find_fault(folder: Path, key: Key | None = None) -> str | None:
    """What is wrong with an entry, or None.

    Args:
        folder: The entry's folder.
        key: The key that it must have been built for; None for whichever its name says.
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
