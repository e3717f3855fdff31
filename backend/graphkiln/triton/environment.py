"""What the supervisor tells the instances, through environment variables: Triton passes nothing else on to Python."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln.lowering.cache import DEFAULT_LIMIT_BYTES, ArtifactCache
from graphkiln.lowering.settings import Override

RUN_FOLDER_VARIABLE = "GRAPHKILN_RUN_FOLDER"
SHARED_FOLDER_VARIABLE = "GRAPHKILN_SHARED_FOLDER"
OVERRIDES_VARIABLE = "GRAPHKILN_OVERRIDES"
CACHE_FOLDER_VARIABLE = "GRAPHKILN_CACHE_FOLDER"
CACHE_BYTES_VARIABLE = "GRAPHKILN_CACHE_BYTES"

Overrides = Mapping[str, Sequence[tuple[str, str, str]]]
"""Model name -> what the command line asks for: key, value, flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The artifact cache that the command line asks for.

    Attributes:
        folder: Where it lies; None for one that vanishes with the server.
        limit_bytes: How large it may grow.
    """

    folder: Path | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES


def to_environment(instances: Path, shared: Path, overrides: Overrides, cache: CacheSettings) -> dict[str, str]:
    """The variables for a server.

    Args:
        instances: Folder of status files.
        shared: Folder for what instances of a model share.
        overrides: What the command line asks for.
        cache: The artifact cache.
    """
    return {
        RUN_FOLDER_VARIABLE: str(instances),
        SHARED_FOLDER_VARIABLE: str(shared),
        OVERRIDES_VARIABLE: json.dumps({model: list(asked) for model, asked in overrides.items()}),
        CACHE_FOLDER_VARIABLE: str(cache.folder or ""),
        CACHE_BYTES_VARIABLE: str(cache.limit_bytes),
    }


def instances_folder() -> Path | None:
    """Folder of status files, or None when no supervisor started this server."""
    return _folder(RUN_FOLDER_VARIABLE)


def shared_folder() -> Path | None:
    """Folder for what instances of a model share, or None when no supervisor started this server."""
    return _folder(SHARED_FOLDER_VARIABLE)


def asked_for(model: str) -> list[Override]:
    """What the command line asks for a model."""
    asked: dict[str, list[list[str]]] = json.loads(os.environ.get(OVERRIDES_VARIABLE, "{}"))
    return [(key, value, flag) for key, value, flag in asked.get(model, [])]


def open_cache(report: Callable[[str], None]) -> ArtifactCache:
    """The artifact cache of this server; one that vanishes with it where the command line asks for none."""
    limit_bytes = int(os.environ.get(CACHE_BYTES_VARIABLE, DEFAULT_LIMIT_BYTES))
    folder = _folder(CACHE_FOLDER_VARIABLE)
    if folder:
        return ArtifactCache(folder, limit_bytes=limit_bytes, report=report)
    shared = shared_folder() or Path(tempfile.gettempdir()) / f"graphkiln-{os.getpid()}"
    return ArtifactCache(shared / "artifacts", limit_bytes=limit_bytes, lasting=False, report=report)


def _folder(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder) if folder else None
