"""The options that several verbs share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.engines.compute_limit import DEFAULT_COMPUTE_LIMIT_S

# The version that a path means, where a command takes a model's folder, too.


def version_folder(path: Path) -> Path:
    """Find a version folder: the folder itself, the newest of a model's folder, or that of a graph file.

    Raises:
        RepositoryError: There is none.
    """
    from graphkiln_backend.repository.version import newest_version
    from graphkiln_backend.repository.version_folders import is_version

    if path.is_file() and is_version(path.absolute().parent.name):
        path = path.absolute().parent
    return path if path.is_dir() and is_version(path.name) else newest_version(path)


# Paths of verbs that read: of this machine, or fetched from a remote store for as long as they are looked at.


@contextmanager
def local_path(path: str) -> Iterator[Path]:
    """Make a path local: `s3://` and the like are fetched into a temporary folder.

    Args:
        path: A model, a version, or a graph.

    Raises:
        RepositoryError: It is an address, but none that is known, or there is nothing.
    """
    from graphkiln_backend.repository.remote_model import fetch_path
    from graphkiln_backend.storage.address import parse_store
    from graphkiln_backend.system.owned_folder import OwnedFolder

    place = parse_store(path)
    if isinstance(place, Path):
        yield place
        return
    with OwnedFolder(prefix="graphkiln-fetched-") as temporary:
        yield fetch_path(place, temporary.path)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]
ComputeLimit = Annotated[
    float,
    typer.Option(
        "--compute-limit", help="How long one batch may take before the command gives up.", metavar="SECONDS", min=0.1
    ),
]
COMPUTE_LIMIT_S = DEFAULT_COMPUTE_LIMIT_S
