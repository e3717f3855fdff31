"""Remove what Triton leaves of models whose files came with the load request.

Triton (24.10) writes such files to `/tmp/folderXXXXXX`, whatever TMPDIR is, and removes the folder when the model is
unloaded; it keeps that of a failed load, and that of a server that is killed while clients hold connections
(`server.drain`). So each instance notes in the run's folder where its model was loaded from.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.triton.environment import shared_folder

NOTES = "sent"  # folder of the notes: links to the folders of models
_TRITONS_FOLDER = re.compile(r"/tmp/folder\w{6}")  # fixed in Triton


def note_sent(model: str | Path) -> None:
    """Note the folder of a model whose files came with the request; does nothing without a supervisor."""
    shared = shared_folder()
    if shared and _TRITONS_FOLDER.fullmatch(str(model)):
        with suppress(OSError):  # noted by another instance; or the disk is full, and loading goes on
            (shared / NOTES).mkdir(exist_ok=True)
            (shared / NOTES / Path(model).name).symlink_to(model)


def remove_sent(notes: Path) -> None:
    """Remove noted folders that have Triton's name and belong to this user, and the notes; `notes` may be missing."""
    for note in notes.glob("*"):
        with suppress(OSError):
            model = note.readlink()
            if _TRITONS_FOLDER.fullmatch(str(model)) and model.lstat().st_uid == os.geteuid():
                shutil.rmtree(model, ignore_errors=True)
        with suppress(OSError):
            note.unlink(missing_ok=True)
