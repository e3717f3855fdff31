"""Folders for temporary files and shared memory, and what dead runs left in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request, format_size
from graphkiln.doctor.models import examine_model
from graphkiln_backend.storage.address import RemoteAddress

# The artifact cache: trusted, writable, how large, what dead builds left.

_OFF = "off"
_LITTLE_BYTES = 1 << 30
_WAY_OUT = "serve works without it and lowers again at each start; choose another folder: --cache DIR"


def check_cache(request: Request) -> Iterator[Finding]:
    """The cache that `serve` would use."""
    from graphkiln_backend.cache.settings import user_cache_folder
    from graphkiln_backend.graph.errors import CacheError

    if request.cache == _OFF:
        yield Finding(subject="artifact cache", message="off: models are lowered again at each start")
        return
    try:
        folder = Path(request.cache).absolute() if request.cache else user_cache_folder()
    except CacheError as error:
        yield Finding(subject="artifact cache", level=Level.WARNING, message=error.message, hint=error.hint)
        return
    yield find_trust(folder)
    if folder.is_dir():
        yield find_size(folder)
        yield find_unfinished(folder)


def find_trust(folder: Path) -> Finding:
    """Whether a folder can be used; one that is missing stays so."""
    from graphkiln_backend.cache.settings import find_cache_distrust, find_unusable

    reason = find_unusable(folder) if folder.exists() else find_cache_distrust(folder)
    return Finding(
        subject="artifact cache",
        level=Level.WARNING if reason else Level.OK,
        message=reason or f"{folder}{', trusted' if folder.exists() else ' is made at the first start'}",
        hint=_WAY_OUT if reason else "",
        facts={"folder": str(folder), "usable": reason is None},
    )


def find_size(folder: Path) -> Finding:
    """How much a cache holds, and how much more it can."""
    from graphkiln_backend.cache.store import ArtifactCache

    with ArtifactCache(folder) as cache:
        sizes = [stored.entry.bytes for stored in cache.entries()]
    free_bytes = shutil.disk_usage(folder).free
    little = free_bytes < _LITTLE_BYTES
    return Finding(
        subject="cache size",
        level=Level.WARNING if little else Level.OK,
        message=f"{len(sizes)} entries, {format_size(sum(sizes))}; {format_size(free_bytes)} free on its disk",
        hint="make room: graphkiln cache prune" if little else "",
        facts={"entries": len(sizes), "bytes": sum(sizes), "free_bytes": free_bytes},
    )


def find_unfinished(folder: Path) -> Finding:
    """What builds have begun in a cache: they run, or are dead."""
    names = sorted(path.name for path in (folder / "partial").glob("*"))
    return Finding(
        subject="unfinished entries",
        message=f"{', '.join(names)}: being built, or left by a dead build; the next start removes the latter"
        if names
        else "none",
        facts={"names": names},
    )


# Each remote store: can it be listed from here, with these credentials, and what would be copied?


def check_remote_stores(request: Request) -> Iterator[Finding]:
    """Lists every store; nothing is copied."""
    from graphkiln_backend.storage.address import RemoteStoreError
    from graphkiln_backend.storage.files import RemoteFiles

    for address in request.remote:
        try:
            listing = RemoteFiles(address).list()
            if is_one_model(listing):
                yield from _find_model(address)
                continue
        except RemoteStoreError as error:
            message = error.message.removeprefix(f"{address}: ")
            yield Finding(subject=str(address), level=Level.ERROR, message=message, hint=error.hint)
            continue
        models = sorted({path.partition("/")[0] for path in listing if "/" in path})
        size = sum(file.size for file in listing.values())
        yield Finding(
            subject=str(address),
            level=Level.OK if models else Level.WARNING,
            message=f"{len(models)} models, {len(listing)} files, {format_size(size)}"
            if models
            else "the model store holds no model",
            facts={"models": models, "files": len(listing), "size_bytes": size},
        )


def is_one_model(listing: Collection[str]) -> bool:
    """Whether a listing is that of a model or a version, rather than of a store.

    Args:
        listing: Paths below the address.
    """
    from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
    from graphkiln_backend.repository.version_folders import is_version

    folders = {path.partition("/")[0] for path in listing if "/" in path}
    own = {CONFIG_FILE, GRAPH_FILE} & set(listing)
    return bool(own) or (bool(folders) and all(map(is_version, folders)))


def _find_model(address: RemoteAddress) -> Iterator[Finding]:
    """One model, examined as one of this machine is; its newest version is fetched for that.

    Raises:
        RemoteStoreError: It cannot be fetched.
    """
    from graphkiln_backend.repository.remote_model import fetch_model
    from graphkiln_backend.repository.stores import model_at
    from graphkiln_backend.system.owned_folder import OwnedFolder

    with OwnedFolder(prefix="graphkiln-doctor-") as temporary:
        fetched = fetch_model(address, temporary.path)
        found, _ = examine_model(model_at(fetched) or fetched, compare_hashes=True)
    yield from found
    yield Finding(
        subject=str(address),
        level=Level.WARNING,
        message="a model, not a store of models: only its newest version was examined",
        hint=f"serve takes the store that holds it: {address.split()[0]}",
    )


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
