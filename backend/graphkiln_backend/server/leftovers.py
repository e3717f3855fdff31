"""Find and remove leftovers of dead runs: run folders, shared-memory regions, processes.

A run is dead if the locks of its supervisor are free (`owned_folder`). Files of other users, and files without a lock,
are never touched. Simultaneous starts do not interfere, because each check holds a lock.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.run_folder import remove_environments, remove_sent_models
from graphkiln_backend.server.shared_memory import OWNER_SUFFIX, SHARED_MEMORY, remove_regions
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, PREFIX, locked_if_dead, owned_folders, remove_owned
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")


_END_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """Leftovers of dead runs.

    Attributes:
        folders: Temporary folders.
        region_owners: Lock files of shared-memory regions.
    """

    folders: Sequence[Path] = ()
    region_owners: Sequence[Path] = ()

    def __bool__(self) -> bool:
        return bool(self.folders or self.region_owners)


def find_leftovers(parents: Iterable[Path] | None = None) -> Leftovers:
    """Find leftovers of dead runs of this user.

    Args:
        parents: Parents of run folders; None for all.
    """
    return Leftovers(
        folders=[path for path in _folders(parents) if _is_dead(path)],
        region_owners=[path for path in _region_owners() if _is_dead(path)],
    )


def remove_leftovers(parents: Iterable[Path] | None = None) -> Leftovers:
    """Remove leftovers of dead runs of this user, and kill their processes; return the removed leftovers."""
    removed = Leftovers(
        folders=[path for path in _folders(parents) if _remove_folder(path)],
        region_owners=[path for path in _region_owners() if _remove_regions(path)],
    )
    if removed:
        _log.info(
            "removed the leftovers of %d dead runs",
            len({_run_name(path) for path in (*removed.folders, *removed.region_owners)}),
        )
    return removed


def living_runs(parents: Iterable[Path] | None = None) -> list[Path]:
    """Temporary folders whose owners are, or may be, alive."""
    return [path for path in _folders(parents) if not _is_dead(path)]


def _folders(parents: Iterable[Path] | None) -> list[Path]:
    return [folder for parent in sorted(set(parents or _default_parents())) for folder in owned_folders(parent)]


def _default_parents() -> set[Path]:
    places = set(OTHER_PARENTS)
    with suppress(OSError):
        places.add(Path(tempfile.gettempdir()))
    return places


def _region_owners() -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"{PREFIX}*{OWNER_SUFFIX}"))


def _run_name(path: Path) -> str:
    return path.name.removesuffix(OWNER_SUFFIX)


def _is_dead(path: Path) -> bool:
    """True if neither the folder nor a folder inside it has an owner: the server of a dead search may be alive."""
    with locked_if_dead(path) as dead:
        return dead and all(map(_is_dead, owned_folders(path)))


def _remove_folder(path: Path) -> bool:
    with locked_if_dead(path) as unowned:
        dead = unowned and all(map(_remove_folder, owned_folders(path)))
        if dead:
            _end_processes(path)
            remove_environments(path.name)
            remove_sent_models(path)
            remove_owned(path)
        return dead and not path.exists()


def _remove_regions(owner: Path) -> bool:
    with locked_if_dead(owner) as dead:
        if dead:
            remove_environments(_run_name(owner))
            remove_regions(_run_name(owner))
        return dead and not owner.exists()


def _end_processes(run: Path) -> None:
    """Kill processes of a dead run, such as a hung instance: they may hold ports."""
    found = [process for process in psutil.process_iter() if _belongs_to(process, run)]
    for process in found:
        _log.warning("killing process %d of a dead server", process.pid)
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=_END_WITHIN_S)


def _belongs_to(process: psutil.Process, run: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        own = process.uids().effective == os.geteuid()
        return own and Path(process.environ().get(RUN_FOLDER_VARIABLE, "/")).is_relative_to(run)
    except (psutil.Error, OSError):
        return False
