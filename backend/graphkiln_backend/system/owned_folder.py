"""Temporary folders that the next start removes if their owner died.

The owner holds a lock on the folder; the kernel releases it when the owner dies. Unlike a PID, that works across PID
namespaces. The folder itself is locked, not a file in it, because cleaners of /tmp such as systemd-tmpfiles skip locked
folders. Folders without `owner.json` are left alone.

Sources: flock(2), tmpfiles.d(5).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import lock_shared, try_lock

PREFIX = "graphkiln-"
OWNER_FILE = "owner.json"
# Parents of run folders if TMPDIR cannot be used or is full.
OTHER_PARENTS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108


class OwnedFolder(Closeable):
    """A new temporary folder, removed by `close`.

    Args:
        parent: Parent folder; None for the system's folder of temporary files.
        prefix: Prefix of the folder's name.

    Raises:
        ServerSetupError: The folder cannot be created.
    """

    def __init__(self, parent: Path | None = None, prefix: str = PREFIX) -> None:
        self._lock = -1
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = hold_lock(self.path)
            (self.path / OWNER_FILE).write_text(json.dumps({"pid": os.getpid()}) + "\n")
        except OSError as error:
            self.close()
            is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            hint = "free space there, or set TMPDIR to another folder" if is_full else "set TMPDIR to a writable folder"
            raise ServerSetupError(f"cannot make a temporary folder: {error}", hint=hint) from error

    def close(self) -> None:
        """Remove the folder."""
        if path := getattr(self, "path", None):
            remove_owned(path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hold_lock(path: Path) -> int:
    """Lock a file or folder; the lock is held until the returned descriptor is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks: other processes cannot take the lock either
        lock_shared(descriptor)
    return descriptor


def create_locked(path: Path) -> int:
    """Create an empty file in /dev/shm that is locked before it has a name. Source: open(2), O_TMPFILE.

    Returns:
        A descriptor; closing it releases the lock.
    """
    descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # as in `hold_lock`
            lock_shared(descriptor)
        # Python follows the link only if `src_dir_fd` is given, although the path is absolute.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked_if_dead(path: Path) -> Iterator[bool]:
    """Lock a file or folder until the end of the block if its owner is dead.

    Yields:
        True if it was locked. False if the owner lives, another process holds the lock, the file system has no locks,
        the path belongs to another user, or it is a symbolic link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield os.fstat(descriptor).st_uid == os.geteuid() and _can_lock(descriptor) and _is_at(descriptor, path)
    finally:
        os.close(descriptor)


def owned_folders(parent: Path, prefix: str = PREFIX) -> list[Path]:
    """List the folders in a parent folder that any process created as `OwnedFolder`."""
    return sorted(path.parent for path in parent.glob(f"{prefix}*/{OWNER_FILE}"))


def remove_dead(parent: Path, prefix: str = PREFIX) -> None:
    """Remove owned folders whose owners are dead; ignore those that cannot be removed."""
    for folder in owned_folders(parent, prefix):
        with locked_if_dead(folder) as dead, suppress(OSError):
            if dead:
                remove_owned(folder)


def remove_owned(path: Path) -> None:
    """Remove a folder, its owner file last: an interrupted removal can be finished by the next start."""
    with suppress(OSError):
        for entry in [entry for entry in path.iterdir() if entry.name != OWNER_FILE]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _can_lock(descriptor: int) -> bool:
    with suppress(OSError):
        return try_lock(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Check that another start has not removed or replaced the opened path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
