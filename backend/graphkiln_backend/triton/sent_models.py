"""Models whose files came with the request that loads them: where Triton has put them, so that they go with the run.

Triton (24.10) writes such files to `/tmp/folderXXXXXX`, wherever TMPDIR leads. It removes the folder when the model is
unloaded. It keeps that of a load that fails, and it is killed before it could remove the others wherever clients hold
connections (`server.drain`). So each instance notes in the run's folder where its model was loaded from.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.triton.environment import shared_folder

NOTES = "sent"  # the folder of the notes: each is a link to where Triton has put a model
_TRITONS_FOLDER = re.compile(r"/tmp/folder\w{6}")  # nobody asks us where


def note_sent(model: str | Path) -> None:
    """Notes where Triton has put a model, if its files came with the request; without a supervisor, nothing is noted.

    Args:
        model: The folder that an instance is loaded from.
    """
    shared = shared_folder()
    if shared and _TRITONS_FOLDER.fullmatch(str(model)):
        with suppress(OSError):  # another instance has noted it; or the disk is full, which is no reason not to load
            (shared / NOTES).mkdir(exist_ok=True)
            (shared / NOTES / Path(model).name).symlink_to(model)


def remove_sent(notes: Path) -> None:
    """Removes what is noted, as far as it is a folder of Triton's and of this user, and the notes.

    Args:
        notes: The folder of the notes; it may be missing.
    """
    for note in notes.glob("*"):
        with suppress(OSError):
            model = note.readlink()
            if _TRITONS_FOLDER.fullmatch(str(model)) and model.lstat().st_uid == os.geteuid():
                shutil.rmtree(model, ignore_errors=True)
        with suppress(OSError):
            note.unlink(missing_ok=True)
