"""Settings that the supervisor passes to instances in environment variables, the only way through Triton."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES, ArtifactCache
from graphkiln_backend.lowering.settings import Override

RUN_FOLDER_VARIABLE = "GRAPHKILN_RUN_FOLDER"
SHARED_FOLDER_VARIABLE = "GRAPHKILN_SHARED_FOLDER"
OVERRIDES_VARIABLE = "GRAPHKILN_OVERRIDES"
CACHE_FOLDER_VARIABLE = "GRAPHKILN_CACHE_FOLDER"
CACHE_BYTES_VARIABLE = "GRAPHKILN_CACHE_BYTES"
REPLAY_INTERVAL_VARIABLE = "GRAPHKILN_REPLAY_INTERVAL"
LOG_FORMAT_VARIABLE = "GRAPHKILN_LOG_FORMAT"  # `json`, where programs read the log

DEFAULT_REPLAY_INTERVAL_S = 600.0

Overrides = Mapping[str, Sequence[Override]]  # model name -> the settings of the command line


def to_environment(
    instances: Path,
    shared: Path,
    overrides: Overrides,
    cache: CacheSettings,
    replay_interval_s: float = DEFAULT_REPLAY_INTERVAL_S,
) -> dict[str, str]:
    """Build the environment variables of a server.

    Args:
        instances: Folder of status files.
        shared: Folder that the instances of a model share.
        overrides: The settings of the command line.
        cache: The artifact cache.
        replay_interval_s: Seconds between two replays of the golden samples of an instance; 0 for none.
    """
    return {
        RUN_FOLDER_VARIABLE: str(instances),
        SHARED_FOLDER_VARIABLE: str(shared),
        OVERRIDES_VARIABLE: json.dumps({model: list(settings) for model, settings in overrides.items()}),
        CACHE_FOLDER_VARIABLE: str(cache.folder or ""),
        CACHE_BYTES_VARIABLE: str(cache.limit_bytes),
        REPLAY_INTERVAL_VARIABLE: str(replay_interval_s),
    }


def instances_folder() -> Path | None:
    """Folder of status files, or None where no supervisor started this server."""
    return _folder(RUN_FOLDER_VARIABLE)


def shared_folder() -> Path | None:
    """Folder that the instances of a model share, or None where no supervisor started this server."""
    return _folder(SHARED_FOLDER_VARIABLE)


def overrides_for(model: str) -> list[Override]:
    """Settings of the command line for a model."""
    overrides: dict[str, list[list[str]]] = json.loads(os.environ.get(OVERRIDES_VARIABLE, "{}"))
    return [Override(*override) for override in overrides.get(model, [])]


def replay_interval_s() -> float:
    """Seconds between two replays of the golden samples of an instance; 0 for none."""
    return float(os.environ.get(REPLAY_INTERVAL_VARIABLE, DEFAULT_REPLAY_INTERVAL_S))


def open_cache() -> ArtifactCache:
    """Open the artifact cache of this server; a temporary one where the command line turned it off."""
    limit_bytes = int(os.environ.get(CACHE_BYTES_VARIABLE, DEFAULT_LIMIT_BYTES))
    settings = CacheSettings(folder=_folder(CACHE_FOLDER_VARIABLE), limit_bytes=limit_bytes)
    shared = shared_folder() or Path(tempfile.gettempdir()) / f"graphkiln-{os.getpid()}"
    return settings.open(shared / "artifacts")


def lift_memory_limit() -> None:
    """Lift the soft limit on data memory that `server.limits` set for tritonserver, up to the user's own."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError, ValueError):  # the system has no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _folder(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder) if folder else None
