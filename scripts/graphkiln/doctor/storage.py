"""Checks of temporary files, shared memory, leftovers of dead runs, and the artifact cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from graphkiln.doctor.examination import Finding, Level, Request, graded, refused
from graphkiln_backend.graph.files import format_size

_RUN_BYTES = 64 << 20  # for copies of Triton's Python backend (20 MiB) and files shared by instances
_SHARED_MEMORY_BYTES = 256 << 20
_LITTLE_BYTES = 1 << 30


def check_temporary_folder(_: Request) -> Iterator[Finding]:
    """Check the folder for temporary files."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.run_folder import temporary_parent
    from graphkiln_backend.system.owned_folder import OwnedFolder

    try:
        parent = temporary_parent()
        with OwnedFolder(parent, prefix="graphkiln-doctor-"):
            pass
    except ServerSetupError as error:
        yield refused("temporary folder", error)
        return
    free_bytes = shutil.disk_usage(parent).free
    yield graded(
        "temporary folder",
        f"{parent}, {format_size(free_bytes)} free",
        warning=free_bytes < _RUN_BYTES,
        hint="free disk space, or set TMPDIR to another folder",
        folder=str(parent),
        free_bytes=free_bytes,
    )


def check_shared_memory(_: Request) -> Iterator[Finding]:
    """Check the folder of shared memory; `check_models` compares it with the models' needs."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.limits import free_shared_memory
    from graphkiln_backend.server.run_folder import SHARED_MEMORY

    try:
        free_bytes = free_shared_memory()
    except ServerSetupError as error:
        yield refused("shared memory", error)
        return
    total_bytes, can_write = shutil.disk_usage(SHARED_MEMORY).total, os.access(SHARED_MEMORY, os.W_OK)
    yield find_shared_memory(SHARED_MEMORY, free_bytes, total_bytes, can_write=can_write)


def find_shared_memory(folder: Path, free_bytes: int, total_bytes: int, *, can_write: bool) -> Finding:
    """Describe the free and total bytes of shared memory."""
    unusable = not can_write or free_bytes < 1 << 20
    hint = "mount a writable tmpfs there" if unusable else "large batches may not fit"
    return graded(
        "shared memory",
        f"{folder}, {format_size(free_bytes)} of {format_size(total_bytes)} free"
        f"{'' if can_write else ', not writable'}",
        error=unusable,
        warning=free_bytes < _SHARED_MEMORY_BYTES,
        hint=f"{hint}; in a container: docker run --shm-size=1g",
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        can_write=can_write,
    )


def check_leftovers(_: Request) -> Iterator[Finding]:
    """Find leftovers of dead runs, and active runs."""
    from graphkiln_backend.server.run_folder import find_leftovers, living_runs

    found = find_leftovers()
    names = [str(path) for path in found]
    yield graded(
        "dead runs",
        f"left {', '.join(names)}" if names else "no leftovers",
        warning=names,
        hint="removed by the next `graphkiln serve` of this user",
        paths=names,
    )
    runs = [str(path) for path in living_runs()]
    yield Finding(
        subject="living runs", message=", ".join(runs) or "no visible runs of this user", facts={"paths": runs}
    )


def check_cache(request: Request) -> Iterator[Finding]:
    """Check that the artifact cache of `serve` is trusted and writable; report its size and unfinished entries."""
    from graphkiln_backend.cache.settings import find_cache_distrust, find_unusable, user_cache_folder
    from graphkiln_backend.graph.errors import CacheError

    if request.cache == "off":
        yield Finding(subject="artifact cache", message="off: models are lowered again at each start")
        return
    try:
        folder = Path(request.cache).absolute() if request.cache else user_cache_folder()
    except CacheError as error:
        yield refused("artifact cache", error, Level.WARNING)
        return
    reason = find_unusable(folder) if folder.exists() else find_cache_distrust(folder)
    yield graded(
        "artifact cache",
        reason or f"{folder}{', trusted' if folder.exists() else ' will be created at the first start'}",
        warning=reason,
        hint="without it, models are lowered again at each start; choose another folder: --cache DIR",
        folder=str(folder),
        usable=reason is None,
    )
    if folder.is_dir():
        yield from _find_content(folder)


def _find_content(folder: Path) -> Iterator[Finding]:
    from graphkiln_backend.cache.store import ArtifactCache

    with ArtifactCache(folder) as cache:
        sizes = [stored.entry.bytes for stored in cache.entries()]
    free_bytes = shutil.disk_usage(folder).free
    yield graded(
        "cache size",
        f"{len(sizes)} entries, {format_size(sum(sizes))}; {format_size(free_bytes)} free on its disk",
        warning=free_bytes < _LITTLE_BYTES,
        hint="free disk space: graphkiln cache prune",
        entries=len(sizes),
        bytes=sum(sizes),
        free_bytes=free_bytes,
    )
    names = sorted(path.name for path in (folder / "partial").glob("*"))
    left = f"{', '.join(names)}: active, or removed at the next start if the build is dead"
    yield Finding(subject="unfinished entries", message=left if names else "none", facts={"names": names})
