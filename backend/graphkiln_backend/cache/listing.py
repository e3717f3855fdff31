"""What lies in the folder of an artifact cache: entries with the time of their last use, and what is no entry."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.cache.entry import ENTRY_FILE, Entry, read_entry


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """An entry as `graphkiln cache list` shows it: where it is, what it is, when it was last used (epoch seconds)."""

    path: Path
    entry: Entry
    used_s: float


def list_entries(entries: Path, locks: Path) -> list[StoredEntry]:
    """Every entry that can be read, the least recently used first.

    Args:
        entries: The folder of all entries.
        locks: That of their locks.
    """
    found = []
    for path in entries.glob("*"):
        entry = read_entry(path)
        with suppress(FileNotFoundError):  # removed meanwhile
            if entry is not None:
                found.append(StoredEntry(path=path, entry=entry, used_s=_used_s(path, locks / path.name)))
    return sorted(found, key=lambda stored: stored.used_s)


def _used_s(path: Path, lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # filled elsewhere, and copied
        return path.stat().st_mtime


def is_left_over(folder: Path) -> bool:
    """Whether a dead build or a damaged disk left a folder.

    What another release wrote is an entry, though it may say more than this one can read.
    """
    try:
        said = json.loads((folder / ENTRY_FILE).read_bytes())
    except (OSError, ValueError):
        return True
    return not (isinstance(said, dict) and "kind" in said)
