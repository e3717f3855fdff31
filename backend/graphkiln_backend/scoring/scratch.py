"""Temporary folders of a run: gone with it, or, where it was killed, when the next one on that machine begins."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from enum import StrEnum
from itertools import product
from pathlib import Path

from graphkiln_backend.system.owned_folder import PREFIX, OwnedFolder, remove_dead

MACHINE_TMP = Path("/tmp")  # noqa: S108 - where TMPDIR's path is too long for sockets; what is made there is private


class Scratch(StrEnum):
    """Purposes of temporary folders, which are part of their names."""

    ERRORS = "errors"
    IDS = "ids"
    MODEL = "model"
    PLAN = "plan"
    RAY = "ray"
    SAMPLE = "sample"
    WORKER = "worker"


def scratch_folder(scratch: Scratch, parent: Path | None = None) -> OwnedFolder:
    """Make a folder; closing it removes it.

    Args:
        scratch: What it is for.
        parent: Where; None for the folder of temporary files.

    Raises:
        ServerSetupError: None can be made.
    """
    return OwnedFolder(parent, _prefix(scratch))


def remove_dead_scratch() -> None:
    """Remove what runs of this user have left on this machine that were killed."""
    places = {MACHINE_TMP}
    with suppress(OSError):
        places.add(Path(tempfile.gettempdir()))
    for place, scratch in product(places, Scratch):
        remove_dead(place, _prefix(scratch))


def _prefix(scratch: Scratch) -> str:
    return f"{PREFIX}{scratch}-"
