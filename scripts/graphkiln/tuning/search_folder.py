"""Where a search keeps its temporary files, and the end of what a search that was killed has left.

Whatever a search starts (servers, sessions that are timed, conversions, the load generator) makes its temporary files
below one folder, to which TMPDIR leads. That folder is locked as long as the search lives (`owned_folder`): the kernel
takes the lock away from a process that dies, so that the next search knows a dead one without a word of its own, across
PID namespaces and however often a PID comes again. What still runs with that TMPDIR then is ended: on machines without
`setpriv`, servers do not end by themselves.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from graphkiln.tuning.server_watch import is_alive
from graphkiln_backend.lowering.parentage import keep_temporary_files_in
from graphkiln_backend.server.leftovers import remove_leftovers
from graphkiln_backend.system.owned_folder import (
    OTHER_PARENTS,
    OWNER_FILE,
    OwnedFolder,
    locked_if_dead,
    owned_folders,
    remove_owned,
)

_log = logging.getLogger("graphkiln.tuning")

_PREFIX = "graphkiln-search-"
_VARIABLE = "TMPDIR"
_END_WITHIN_S = 20.0
"""A server that is asked to end has so long; then it is killed."""
_POLL_S = 0.05


@contextmanager
def search_folder() -> Iterator[Path]:
    """A folder for all temporary files of this process and those that it starts; gone afterwards.

    Raises:
        ServerSetupError: None can be made.
    """
    clear_dead()
    for pid in other_searches():
        _log.warning("another search runs on this machine (process %d): each measures what the other one leaves", pid)
    with OwnedFolder(prefix=_PREFIX) as folder, _temporary_files_in(folder.path):
        yield folder.path


def clear_dead(parents: Iterable[Path] | None = None) -> list[Path]:
    """Ends what searches of this user left running that are dead, and removes their folders.

    Args:
        parents: Where such folders lie; None for all where they are made.

    Returns:
        The folders that were removed.
    """
    return [folder for folder in _folders(parents) if _clear(folder)]


def other_searches(parents: Iterable[Path] | None = None) -> list[int]:
    """The processes of searches that run on this machine now, as far as this user sees them.

    Args:
        parents: As for `clear_dead`.
    """
    return [_owner(folder) for folder in _folders(parents) if not _is_dead(folder)]


def _folders(parents: Iterable[Path] | None) -> list[Path]:
    places = set(parents) if parents is not None else {Path(tempfile.gettempdir()), *OTHER_PARENTS}
    return [folder for place in sorted(places) for folder in owned_folders(place, _PREFIX)]


def _is_dead(folder: Path) -> bool:
    with locked_if_dead(folder) as dead:
        return dead


def _owner(folder: Path) -> int:
    """For people; 0 where it cannot be read."""
    try:
        return int(json.loads((folder / OWNER_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _clear(folder: Path) -> bool:
    with locked_if_dead(folder) as dead:
        if dead:
            _end_processes(folder)
            remove_leftovers([folder])  # of its servers, with what they have in shared memory
            remove_owned(folder)
            _log.info("removed what a search left that was killed: %s", folder)
        return dead and not folder.exists()


def _end_processes(folder: Path) -> None:
    """Asks all that works below a folder to end, and kills what does not."""
    found = [process for process in psutil.process_iter() if _works_below(process, folder)]
    for process in found:
        _log.warning("ending process %d, which a search left that was killed", process.pid)
        with suppress(psutil.Error):
            process.terminate()
    for process in _alive_after(found, _END_WITHIN_S):
        with suppress(psutil.Error):
            process.kill()
    _alive_after(found, _END_WITHIN_S)


def _alive_after(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended in so many seconds; one that nobody waits for has ended all the same."""
    end, alive = time.monotonic() + seconds, list(filter(is_alive, processes))
    while alive and time.monotonic() < end:
        time.sleep(_POLL_S)
        alive = list(filter(is_alive, alive))
    return alive


def _works_below(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        own = process.uids().effective == os.geteuid()
        return own and Path(process.environ().get(_VARIABLE, "/")).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    known, told = tempfile.tempdir, os.environ.get(_VARIABLE)
    keep_temporary_files_in(str(folder))
    try:
        yield
    finally:
        tempfile.tempdir = known
        if told is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = told
