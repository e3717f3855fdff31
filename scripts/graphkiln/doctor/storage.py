"""Folders for temporary files and shared memory, and what dead runs left in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request, format_size

_RUN_BYTES = 64 << 20  # A run folder holds copies of Triton's Python backend (20 MB), and what instances share
_SHARED_MEMORY_BYTES = 256 << 20


def check_temporary_folder(_: Request) -> Iterator[Finding]:
    """The folder that run folders are made in."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.run_folder import temporary_parent
    from graphkiln_backend.system.owned_folder import OwnedFolder

    try:
        parent = temporary_parent()
        with OwnedFolder(parent, prefix="graphkiln-doctor-"):
            pass
    except ServerSetupError as error:
        yield Finding(subject="temporary folder", level=Level.ERROR, message=error.message, hint=error.hint)
    else:
        yield find_temporary(parent, shutil.disk_usage(parent).free)


def check_shared_memory(_: Request) -> Iterator[Finding]:
    """The folder of shared memory."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.run_folder import SHARED_MEMORY, free_shared_memory

    try:
        free_bytes = free_shared_memory()
    except ServerSetupError as error:
        yield Finding(subject="shared memory", level=Level.ERROR, message=error.message, hint=error.hint)
        return
    total_bytes, can_write = shutil.disk_usage(SHARED_MEMORY).total, os.access(SHARED_MEMORY, os.W_OK)
    yield find_shared_memory(SHARED_MEMORY, free_bytes, total_bytes, can_write=can_write)


def find_temporary(parent: Path, free_bytes: int) -> Finding:
    """The folder that run folders are made in.

    Args:
        parent: The folder, which can be written.
        free_bytes: What is free there.
    """
    little = free_bytes < _RUN_BYTES
    return Finding(
        subject="temporary folder",
        level=Level.WARNING if little else Level.OK,
        message=f"{parent}, {format_size(free_bytes)} free",
        hint="make room there, or set TMPDIR to another folder" if little else "",
        facts={"folder": str(parent), "free_bytes": free_bytes},
    )


def find_shared_memory(folder: Path, free_bytes: int, total_bytes: int, *, can_write: bool) -> Finding:
    """The folder of shared memory; what the models of a store need of it is found with them.

    Args:
        folder: The folder.
        free_bytes: What is free there.
        total_bytes: Its size.
        can_write: Whether this user may write there.
    """
    level, hint = Level.OK, ""
    if not can_write or free_bytes < 1 << 20:
        level, hint = Level.ERROR, "mount a tmpfs there that can be written; in a container: docker run --shm-size=1g"
    elif free_bytes < _SHARED_MEMORY_BYTES:
        level, hint = Level.WARNING, "large batches may not fit; in a container: docker run --shm-size=1g"
    return Finding(
        subject="shared memory",
        level=level,
        message=f"{folder}, {format_size(free_bytes)} of {format_size(total_bytes)} free"
        f"{'' if can_write else ', cannot be written'}",
        hint=hint,
        facts={"free_bytes": free_bytes, "total_bytes": total_bytes, "can_write": can_write},
    )


def check_leftovers(_: Request) -> Iterator[Finding]:
    """What dead runs left, and which runs live."""
    from graphkiln_backend.server.leftovers import find_leftovers, living_runs

    found = find_leftovers()
    names = [str(path) for path in (*found.folders, *found.region_owners)]
    yield Finding(
        subject="dead runs",
        level=Level.WARNING if names else Level.OK,
        message=f"left {', '.join(names)}" if names else "left nothing",
        hint="the next `graphkiln serve` of this user removes it" if names else "",
        facts={"paths": names},
    )
    runs = [str(path) for path in living_runs()]
    yield Finding(
        subject="living runs", message=", ".join(runs) or "none of this user is to be seen", facts={"paths": runs}
    )
