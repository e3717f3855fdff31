"""`graphkiln pull`: the models of a registry or an object store, into a model store of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphkiln.cli.signers import TrustedKeysOption
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError


def pull(
    address: Annotated[
        str, typer.Argument(help="oci://HOST/REPOSITORY:TAG, s3://BUCKET/STORE, ..., or a model in it: ADDRESS/NAME.")
    ],
    store: Annotated[Path, typer.Argument(help="Folder of models, made when missing.")],
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Pull models from a registry or object store into a folder.

    The counterpart of `graphkiln push`. What the store has already stays; another file under the same name is
    refused before anything is changed. With --trusted-keys, so is a version that none of them has signed.
    """
    from graphkiln_backend.repository.remote_address import RemoteAddress
    from graphkiln_backend.repository.remote_pull import fetch_store

    source = RemoteAddress.parse(address)
    if source is None:
        raise RepositoryError(f"'{address}' is no address", hint="oci://HOST/REPOSITORY:TAG, s3://BUCKET/STORE, ...")
    with fetch_store(source, store) as fetched:
        for version in fetched.versions() if trusted_keys else ():
            _check_signed(version, trusted_keys)
        pulled = fetched.place()
    what = f"{pulled.files} new files, {pulled.size_bytes / 1e6:.1f} MB" if pulled.files else "nothing is new"
    typer.echo(f"{store}: {what} ({', '.join(pulled.models)} of {source})")


def _check_signed(version: Path, trusted_keys: Path | None) -> None:
    from graphkiln.cli.signers import check_signers

    try:
        check_signers(version, trusted_keys)
    except GraphkilnError as error:
        words = f"{version.parent.name} version {version.name} is not pulled: {error.message}"
        raise RepositoryError(words, hint=error.hint) from error
