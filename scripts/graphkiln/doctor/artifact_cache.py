"""The artifact cache: trusted, writable, how large, what dead builds left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request, format_size

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
