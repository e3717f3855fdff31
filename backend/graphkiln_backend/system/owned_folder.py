"""A temporary folder whose owner may die: the next start finds out, and removes it.

The owner holds a lock on the folder itself as long as it lives; the kernel takes it away from a process that dies. That
holds across PID namespaces, where a PID would say nothing. Folders without `owner.json` are left alone.

Why the folder and not a file in it: cleaners of /tmp, such as systemd-tmpfiles, leave a folder alone that is locked.
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

PREFIX = "graphkiln-"  # what the names of all such folders begin with
OWNER_FILE = "owner.json"  # for people: whose folder it is
# Where run folders are made where that of temporary files does not do.
OTHER_PARENTS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - where TMPDIR cannot be used, or is full


class OwnedFolder(Closeable):
    """A new temporary folder; closing it removes it.

    Args:
        parent: Where to make it; None for the folder of temporary files.
        prefix: What its name begins with.

    Attributes:
        path: The folder.

    Raises:
        ServerSetupError: None can be made.
    """

    def __init__(self, parent: Path | None = None, prefix: str = PREFIX) -> None:
        self._lock = -1
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = hold_lock(self.path)
            (self.path / OWNER_FILE).write_text(json.dumps({"pid": os.getpid()}) + "\n")
        except OSError as error:
            self.close()
            raise ServerSetupError(f"cannot make a temporary folder: {error}", hint=_way_out(error)) from error

    def close(self) -> None:
        """Remove the folder."""
        if path := getattr(self, "path", None):
            remove_owned(path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hold_lock(path: Path) -> int:
    """Take a lock on a file or folder, for as long as the returned descriptor stays open.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks: then others do not find it unlocked either
        lock_shared(descriptor)
    return descriptor


def create_locked(path: Path) -> int:
    """Make an empty file in /dev/shm that is locked from the first moment that it has a name: open(2), O_TMPFILE.

    Returns:
        A descriptor; the lock is held as long as it stays open.

    Raises:
        OSError: It cannot be made.
    """
    descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # as in `hold_lock`
            lock_shared(descriptor)
        # A folder is named, though the path needs none, because Python follows the link only where one is.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked_if_dead(path: Path) -> Iterator[bool]:
    """Check whether the owner of a file or folder of this user is dead.

    Args:
        path: The path that the owner locked.

    Yields:
        Whether it is: then another process gets False until the end of the block. False where there is no telling,
        for what belongs to another user, and for links.
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
    """The folders in a folder that were made as `OwnedFolder`, by any process."""
    return sorted(path.parent for path in parent.glob(f"{prefix}*/{OWNER_FILE}"))


def remove_dead(parent: Path, prefix: str = PREFIX) -> None:
    """Remove owned folders whose owners are dead, as far as possible."""
    for left in owned_folders(parent, prefix):
        with locked_if_dead(left) as dead, suppress(OSError):
            if dead:
                remove_owned(left)


def remove_owned(path: Path) -> None:
    """Remove a folder; where that is interrupted, what is left still has its owner file."""
    with suppress(OSError):
        for inside in [inside for inside in path.iterdir() if inside.name != OWNER_FILE]:
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
            else:
                inside.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _can_lock(descriptor: int) -> bool:
    with suppress(OSError):
        return try_lock(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """True if what was opened is still there: another start may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _way_out(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "make room there, or set TMPDIR to another folder"
    return "set TMPDIR to a folder that can be written"
