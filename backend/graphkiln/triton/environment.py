"""What the supervisor tells the instances, through environment variables: Triton passes nothing else on to Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

RUN_FOLDER_VARIABLE = "GRAPHKILN_RUN_FOLDER"
SHARED_FOLDER_VARIABLE = "GRAPHKILN_SHARED_FOLDER"
ENGINES_VARIABLE = "GRAPHKILN_ENGINES"


def to_environment(instances: Path, shared: Path, engines: Mapping[str, str]) -> dict[str, str]:
    """The variables for a server.

    Args:
        instances: Folder of status files.
        shared: Folder for what instances of a model share.
        engines: Model name -> engine that the command line asks for.
    """
    return {
        RUN_FOLDER_VARIABLE: str(instances),
        SHARED_FOLDER_VARIABLE: str(shared),
        ENGINES_VARIABLE: json.dumps(dict(engines)),
    }


def instances_folder() -> Path | None:
    """Folder of status files, or None when no supervisor started this server."""
    return _folder(RUN_FOLDER_VARIABLE)


def shared_folder() -> Path | None:
    """Folder for what instances of a model share, or None when no supervisor started this server."""
    return _folder(SHARED_FOLDER_VARIABLE)


def asked_engine(model: str) -> str | None:
    """The engine that the command line asks for, or None."""
    engines: dict[str, str] = json.loads(os.environ.get(ENGINES_VARIABLE, "{}"))
    return engines.get(model)


def _folder(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder) if folder else None
