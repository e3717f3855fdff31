"""Where the local copies of remote stores lie: beside the artifacts, one for each process that serves a store."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.owned_folder import OwnedFolder
from graphkiln_backend.repository.remote_address import RemoteAddress

_log = logging.getLogger("graphkiln.server")

_FOLDER = "stores"
_UNUSED_S = 30 * 24 * 3600.0
"""A copy that no server has used for so long is removed."""
_SLOTS = 64
"""Servers of one user that serve the same store at once: each has a copy of its own."""


def copies_folder(cache: CacheSettings) -> Path | None:
    """Where copies last; None where they cannot."""
    if cache.folder is None:
        return None
    folder = cache.folder / _FOLDER
    if reason := find_distrust(folder):
        _log.warning("remote stores are copied anew at each start: %s is not trusted, because %s", folder, reason)
        return None
    try:
        make_private(folder)
        with OwnedFolder(folder):
            return folder
    except (OSError, ServerSetupError) as error:
        _log.warning("remote stores are copied anew at each start: %s", error)
        return None


@contextmanager
def copy_folder(folder: Path | None, address: RemoteAddress) -> Iterator[Path]:
    """A folder for one copy that no other process uses."""
    if folder is None:
        with OwnedFolder(prefix="graphkiln-store-") as vanishing:
            yield vanishing.path
        return
    digest = hashlib.sha256(f"{address.scheme} {address.options} {address.root}".encode()).hexdigest()[:16]
    for slot in range(_SLOTS):
        place = folder / (f"{digest}-{slot}" if slot else digest)
        with _locked(place) as is_ours:
            if is_ours:
                (place / "address").write_text(f"{address}\n", encoding="utf-8")
                yield place
                return
    raise ServerSetupError(f"{_SLOTS} servers serve {address} already", hint="name another folder: --cache DIR")


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Makes a folder and locks it; gives whether nobody else holds it."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ServerSetupError(f"{place} cannot be made: {error.strerror}", hint="--cache DIR") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        yield False
    else:
        os.utime(place)
        yield True
    finally:
        os.close(descriptor)


def remove_unused(folder: Path, now_s: float) -> None:
    """Removes copies that nobody has used for a month, as far as no process holds them.

    Args:
        folder: Where all copies lie.
        now_s: Seconds of the epoch.
    """
    for place in folder.iterdir():
        with suppress(OSError):
            is_old = place.is_dir() and now_s - place.stat().st_mtime > _UNUSED_S
            if is_old and _nobody_holds(place):
                _log.info("removing a copy of %s, unused for a month", (place / "address").read_text("utf-8").strip())
                shutil.rmtree(place, ignore_errors=True)


def _nobody_holds(place: Path) -> bool:
    with _locked(place) as is_ours:
        return is_ours
