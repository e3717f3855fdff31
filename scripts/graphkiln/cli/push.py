"""`graphkiln push`: a model store into a container registry, from which it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.graph.errors import RepositoryError


def push(
    store: Annotated[Path, typer.Argument(help="Folder of models, or of one: STORE/MODEL.")],
    address: Annotated[str, typer.Argument(help="oci://HOST/REPOSITORY:TAG", metavar="ADDRESS")],
) -> None:
    """Push a model store to a container registry as an OCI artifact.

    `graphkiln serve --model-store ADDRESS` serves it from there. Signatures (`graphkiln sign`) go with it.
    Credentials are those of `docker login`.
    """
    from graphkiln.cli.model_stores import open_stores
    from graphkiln_backend.repository.remote_model import push_store
    from graphkiln_backend.storage.address import RemoteAddress

    target = RemoteAddress.parse(address)
    if target is None:
        raise RepositoryError(f"'{address}' is no address", hint="oci://HOST/REPOSITORY:TAG")
    with open_stores([store]) as (folder,):
        pushed = push_store(folder, target)
    typer.echo(f"{target}: {pushed.files} files, {pushed.size_bytes / 1e6:.1f} MB, {pushed.digest}")
