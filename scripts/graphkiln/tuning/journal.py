"""The journal of a search: one line of JSON for each event, on the disk before the next one begins.

The first line says what was searched: another model, machine, space, target or version of the format is another search,
and its journal is refused. A process that dies leaves at most one torn line, the last, which is dropped. One process at
a time has a journal open.

Source: fsync(2), flock(2).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.closing import Closeable

_VERSION = 1
_LIMIT = 256 * MIB


class Journal(Closeable):
    """A journal that is open, and locked.

    Args:
        path: The file; it and its folder are made where they are not there.
        subject: What is searched, as JSON data by names that people understand, such as `model` and `machine`.

    Raises:
        MeasurementError: Another process has it open, it belongs to another search, it is damaged, or it cannot be
            written.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._descriptor = _open_locked(path)
        try:
            self._read({"version": _VERSION, **subject})
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, event: Mapping[str, Any]) -> None:
        """Writes an event; it is on the disk when this returns.

        Raises:
            MeasurementError: It cannot be written.
        """
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            self._write(json.dumps(event, allow_nan=False).encode() + b"\n")
        except OSError as error:
            os.ftruncate(self._descriptor, end)  # half a line would be damage in the middle once there is room again
            os.lseek(self._descriptor, end, os.SEEK_SET)
            raise MeasurementError(
                f"{self.path} cannot be written: {error.strerror}", hint="make room; then the same command goes on"
            ) from error
        self.events.append(dict(event))

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Lets others have it."""
        os.close(self._descriptor)

    def _read(self, subject: Mapping[str, Any]) -> None:
        try:
            content = read_bytes(self.path, _LIMIT)
        except OSError as error:
            raise _unusable(self.path, f"cannot be read: {error}") from error
        whole = content.rpartition(b"\n")[0]
        lines = whole.split(b"\n") if whole else []
        os.ftruncate(self._descriptor, len(whole) + 1 if lines else 0)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        if not lines:
            self.append(subject)
            _sync_folder(self.path)
        else:
            self.events = [_parse(self.path, number, line) for number, line in enumerate(lines, 1)]
            _check_subject(self.path, self.events[0], json.loads(json.dumps(subject)))
        del self.events[0]


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except IsADirectoryError as error:
        raise _unusable(path, f"cannot be opened: {error.strerror}") from error
    except OSError as error:
        raise MeasurementError(
            f"{path} cannot be opened: {error.strerror}",
            hint="what was measured is kept there: make it writable, or set XDG_CACHE_HOME to another folder",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise MeasurementError(f"{path} is another search's that runs now", hint="wait until it ends") from error
    return descriptor


def _sync_folder(path: Path) -> None:
    """Puts the name of a new file on the disk, too."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise _unusable(path, f"is damaged at line {number}: {error}") from error
    if not isinstance(event, dict):
        raise _unusable(path, f"is damaged at line {number}: expected an object")
    return event


def _check_subject(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differing = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
    if differing:
        key = differing[0]
        others = f", and {', '.join(differing[1:])}" if differing[1:] else ""
        raise _unusable(
            path,
            f"belongs to another search: {key} is {_short(expected.get(key))}, the journal's {_short(found.get(key))}"
            f"{others}",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unusable(path: Path, what: str) -> MeasurementError:
    return MeasurementError(f"{path} {what}", hint="delete it: what it holds is measured anew")
