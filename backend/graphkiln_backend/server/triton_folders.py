"""What Triton (24.10) puts into /tmp wherever TMPDIR leads, and leaves there when it is killed: found again, removed.

- `/tmp/gk-XXXXyyyyyy/`: what its Python backend makes for packed environments, as `/tmp/python_env_yyyyyy`. The copy of
  the backend in a run folder is told another name, by which it can be told whose the folder is.
- `/tmp/folderXXXXXX/`: models whose files came with the request that loads them. Who is loaded from there notes it in
  the run folder (graphkiln_backend.triton.sent_models).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from graphkiln_backend.system.owned_folder import PREFIX
from graphkiln_backend.triton.sent_models import NOTES, remove_sent

_ENVIRONMENTS = b"/tmp/python_env_"
"""Where the folder for environments is made, followed by six random letters: a constant in the backend's library."""


def rename_environments(library: Path, run: str) -> None:
    """Gives the folder that a copied Python backend makes a name by which it can be told whose it is.

    Args:
        library: The copy; changed in place where it is of the release that is known.
        run: The name of the run's folder.

    Raises:
        OSError: It cannot be written.
    """
    content, own = library.read_bytes(), os.fsencode(_environments(run))
    if len(own) == len(_ENVIRONMENTS) and content.count(_ENVIRONMENTS) == 1:
        library.write_bytes(content.replace(_ENVIRONMENTS, own))


def environments_of(run: str) -> list[Path]:
    """What Triton's Python backend has made for packed environments in a run.

    Args:
        run: The name of the run's folder.
    """
    prefix = Path(_environments(run))
    return sorted(prefix.parent.glob(f"{prefix.name}??????"))


def remove_environments(run: str) -> None:
    """Removes what Triton's Python backend made for packed environments and left, as far as it can be.

    Args:
        run: The name of the run's folder.
    """
    for folder in environments_of(run):
        shutil.rmtree(folder, ignore_errors=True)


def remove_sent_models(run: Path) -> None:
    """Removes what Triton has kept of models whose files came with a request, as far as it can be.

    Args:
        run: The folder of the run, whose server is dead.
    """
    for noting in ("shared", "overlay"):  # instances, and what makes Triton forget a failure
        remove_sent(run / noting / NOTES)


def _environments(run: str) -> str:
    """What stands in the place of `_ENVIRONMENTS`: as long, and unique, as the run's name is."""
    return f"/tmp/gk-{run.removeprefix(PREFIX)}"  # noqa: S108 - the backend asks nobody where
