"""Remove leftover folders of models whose files were sent in a load request.

Triton (24.10) writes such files to `/tmp/folderXXXXXX`, ignoring TMPDIR, and removes the folder when the model is
unloaded, but not after a failed load or when the server is killed. So each instance records in the run folder where its
model was loaded from.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.triton.environment import shared_folder

NOTES = "sent"  # folder of symbolic links to the folders of models
_TRITONS_FOLDER = re.compile(r"/tmp/folder\w{6}")  # hard-coded in Triton


def note_sent(model: str | Path) -> None:
    """Record the folder of a model whose files were sent; does nothing without a supervisor."""
    shared = shared_folder()
    if shared and _TRITONS_FOLDER.fullmatch(str(model)):
        with suppress(OSError):  # recorded by another instance, or the disk is full: loading continues
            (shared / NOTES).mkdir(exist_ok=True)
            (shared / NOTES / Path(model).name).symlink_to(model)


def remove_sent(notes: Path) -> None:
    """Remove recorded folders that match Triton's pattern and belong to this user, and the records themselves."""
    for note in notes.glob("*"):
        with suppress(OSError):
            model = note.readlink()
            if _TRITONS_FOLDER.fullmatch(str(model)) and model.lstat().st_uid == os.geteuid():
                shutil.rmtree(model, ignore_errors=True)
        with suppress(OSError):
            note.unlink(missing_ok=True)
