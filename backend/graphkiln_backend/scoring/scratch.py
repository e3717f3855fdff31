"""Temporary folders of a run. The next run on the machine removes those of a run that was killed."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from graphkiln_backend.system.owned_folder import PREFIX, OwnedFolder, remove_dead


class Scratch(StrEnum):
    """Purpose of a temporary folder, which is part of its name."""

    ERRORS = "errors"
    IDS = "ids"
    MODEL = "model"
    PLAN = "plan"
    SAMPLE = "sample"


def scratch_folder(scratch: Scratch, parent: Path | None = None) -> OwnedFolder:
    """Create a folder that is removed when it is closed.

    Args:
        scratch: Its purpose.
        parent: Parent folder; None for the system's folder of temporary files.

    Raises:
        ServerSetupError: It cannot be created.
    """
    return OwnedFolder(parent, f"{PREFIX}{scratch}-")


def remove_dead_scratch() -> None:
    """Remove folders of this user's runs on this machine that were killed."""
    with suppress(OSError):
        parent = Path(tempfile.gettempdir())
        for scratch in Scratch:
            remove_dead(parent, f"{PREFIX}{scratch}-")
