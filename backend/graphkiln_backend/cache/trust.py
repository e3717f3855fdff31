"""Checks of folders whose files this process will execute.

Compiled artifacts are code. Checksums beside them do not help against an attacker who can write both, so a folder is
trusted only if no one except this user and root can write to it, like ssh's files (sshd_config(5), StrictModes).
Parent folders may have the sticky bit, like /tmp: others cannot rename this user's files there.

Volumes of a Kubernetes pod are world-writable (2777) but only reachable from the pod. `GRAPHKILN_TRUSTED_VOLUME` names
the volume to trust for that reason.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TRUSTED_VOLUME = "GRAPHKILN_TRUSTED_VOLUME"  # environment variable
_ROOT = 0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # the limit of Linux. Source: path_resolution(7).


def find_distrust(folder: Path) -> str | None:
    """Return the reason why a folder must not be trusted, or None. A folder that does not exist is trusted.

    All parent folders and links on the way are checked: an attacker who can replace one controls everything below.
    """
    try:
        places = list(_places(folder.absolute()))
        for place in places:
            if reason := _distrust(place, place.lstat(), is_above=place != places[-1]):
                return reason
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{error.filename or folder} cannot be examined: {error.strerror}"
    return None


def find_distrust_inside(folder: Path) -> str | None:
    """Return the reason why files in a trusted folder must not be trusted, or None.

    Raises:
        OSError: The folder cannot be read.
    """
    for place in (folder, *sorted(folder.rglob("*"))):
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            return f"{place} is neither a file nor a folder"
        if reason := _distrust(place, status, is_above=False):
            return reason
    return None


def close_to_others(folder: Path) -> None:
    """Remove the write permission of group and others from a folder and its files."""
    for place in (folder, *folder.rglob("*")):
        with suppress(OSError):  # a file system without permissions
            if not place.is_symlink():
                place.chmod(place.stat().st_mode & ~_WRITABLE_BY_OTHERS)


def make_private(folder: Path) -> None:
    """Create a folder and its parents, writable only by this user regardless of the umask.

    Raises:
        OSError: The folder cannot be created, or is not a folder.
    """
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o755, exist_ok=True)


def _distrust(place: Path, status: os.stat_result, *, is_above: bool) -> str | None:
    if status.st_uid not in {_ROOT, os.geteuid()}:
        return f"{place} belongs to another user ({status.st_uid})"
    mode = status.st_mode
    harmless = stat.S_ISLNK(mode) or (is_above and mode & stat.S_ISVTX) or _is_own_volume(place)
    if mode & _WRITABLE_BY_OTHERS and not harmless:
        return f"{place} can be written by other users (mode {stat.S_IMODE(mode):o})"
    return None


def _is_own_volume(place: Path) -> bool:
    """Return true for the trusted volume. Source: Kubernetes, "Configure a Security Context", fsGroup (mode 2777)."""
    return str(place) == os.environ.get(TRUSTED_VOLUME)


def _places(path: Path) -> Iterator[Path]:
    """Yield all folders and links that the kernel resolves for a path, ending with the path.

    Raises:
        OSError: There are too many links, or one cannot be read.
    """
    current = Path(path.anchor)
    rest = list(reversed(path.parts[1:]))
    links = 0
    yield current
    while rest:
        part = rest.pop()
        if part == "..":
            current = current.parent
            continue
        current /= part
        yield current
        if current.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = current.readlink()
            rest.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            current = Path(target.anchor) if target.is_absolute() else current.parent
