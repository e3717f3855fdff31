"""`graphkiln cache`: list, prune and verify the artifact cache."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import print_table, say
from graphkiln_backend.graph.errors import CacheError, ServerSetupError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.text import read_size

if TYPE_CHECKING:
    from graphkiln_backend.cache.settings import CacheSettings
    from graphkiln_backend.cache.store import ArtifactCache

OFF = "off"

_Folder = Annotated[
    str, typer.Option("--cache", help="Cache folder.", envvar="GRAPHKILN_CACHE", show_default="~/.cache/graphkiln")
]

app = typer.Typer(help="List, prune and verify the cache of lowered graphs.", no_args_is_help=True)


@app.command(name="list")
def list_(folder: _Folder = "") -> None:
    """List the entries with model, size, build time and last use."""
    with _open(folder) as cache:
        entries = cache.entries()
        rows = [
            (
                item.path.name[: len(item.entry.kind) + 9],
                item.entry.model,
                format_size(item.entry.bytes),
                f"{item.entry.seconds:.1f} s",
                time.strftime("%Y-%m-%d", time.localtime(item.used_s)),
            )
            for item in reversed(entries)
        ]
        print_table(("entry", "model", "size", "build", "last used"), rows, empty="the cache is empty")
        typer.echo(f"{format_size(sum(item.entry.bytes for item in entries))} in {cache.folder}")


@app.command()
def prune(
    to: Annotated[str, typer.Option(help="Remove least recently used entries until this size is left.")] = "0",
    folder: _Folder = "",
) -> None:
    """Remove unused entries and incomplete builds."""
    with _open(folder) as cache:
        before = {item.path: item.entry.bytes for item in cache.entries()}
        removed = cache.prune(parse_size(to))
        left = sum(before.values()) - sum(before[path] for path in removed)
        typer.echo(f"removed {len(removed)} of {len(before)} entries, {format_size(left)} are left in {cache.folder}")


@app.command()
def verify(folder: _Folder = "") -> None:
    """Compare all entries with their checksums.

    Exit code 1 when an entry is damaged; it will be rebuilt when needed.
    """
    with _open(folder) as cache:
        faults = cache.faults()
        for path, fault in faults.items():
            typer.echo(f"{path}: {fault}")
        total = len(cache.entries())
        typer.echo(f"{total - len(faults)} of {total} entries are whole" if not faults else f"{len(faults)} damaged")
    raise typer.Exit(1 if faults else 0)


def cache_settings(folder: str, limit_bytes: int) -> CacheSettings:
    """Return the settings of `--cache`: a folder, `off`, or "" for the default folder."""
    from graphkiln_backend.cache.settings import CacheSettings, user_cache_folder

    if folder == OFF:
        return CacheSettings(limit_bytes=limit_bytes)
    if folder:
        place = os.path.expanduser(folder)  # noqa: PTH111 - keeps `~unknown` instead of raising
        return CacheSettings(folder=Path(place).absolute(), limit_bytes=limit_bytes)
    try:
        return CacheSettings(folder=user_cache_folder(), limit_bytes=limit_bytes)
    except CacheError as error:
        say(f"no artifact cache: {error}")
        return CacheSettings(limit_bytes=limit_bytes)


def parse_size(text: str) -> int:
    """Parse a size such as `500M` or `20G` (powers of 1024) into bytes.

    Raises:
        ServerSetupError: The text is not a size.
    """
    size = read_size(text)
    if size is None:
        raise ServerSetupError(f"'{text[:40]}' is not a size", hint="write 500M or 20G")
    return size


def _open(folder: str) -> ArtifactCache:
    from graphkiln_backend.cache.settings import user_cache_folder
    from graphkiln_backend.cache.store import ArtifactCache

    if folder == OFF:
        raise CacheError("the cache is off", hint="give its folder: --cache DIR")
    path = Path(folder) if folder else user_cache_folder()
    if not path.is_dir():
        raise CacheError(
            f"there is no cache at {path}", hint="give its folder: --cache DIR; `serve` and `lower` create it"
        )
    return ArtifactCache(path)
