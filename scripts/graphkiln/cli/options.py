"""Options and arguments shared by several verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.engines.compute_limit import DEFAULT_COMPUTE_LIMIT_S

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
ModelName = Annotated[str, typer.Option("--model", help="Model name.")]
ModelVersion = Annotated[str, typer.Option("--version", help="Model version.", show_default="the server's choice")]
ModelPath = Annotated[
    str, typer.Argument(help="STORE/NAME (newest version), or STORE/NAME/VERSION; also s3:// and others.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting of config.pbtxt, such as precision=bf16.", metavar="KEY=VALUE"),
]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder of lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]
ComputeLimit = Annotated[
    float,
    typer.Option("--compute-limit", help="Timeout for computing one batch.", metavar="SECONDS", min=0.1),
]
COMPUTE_LIMIT_S = DEFAULT_COMPUTE_LIMIT_S


def version_folder(path: Path) -> Path:
    """Resolve a path to a version folder: itself, the newest one of a model, or that of a graph file.

    Raises:
        RepositoryError: The path does not contain a version.
    """
    from graphkiln_backend.repository.version import newest_version
    from graphkiln_backend.repository.version_folders import is_version

    if path.is_file() and is_version(path.absolute().parent.name):
        path = path.absolute().parent
    return path if path.is_dir() and is_version(path.name) else newest_version(path)


@contextmanager
def local_path(path: str) -> Iterator[Path]:
    """Yield a local path of a model, version or graph; fetch remote ones (`s3://`) into a temporary folder.

    Raises:
        RepositoryError: The address is invalid, or nothing is there.
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
