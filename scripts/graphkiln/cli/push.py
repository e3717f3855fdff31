"""`graphkiln push` and `graphkiln pull`: model stores to and from container registries and object stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graphkiln.cli.sign import TrustedKeysOption
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError, ServerSetupError

_HIDDEN = ".pull-"


def push(
    store: Annotated[Path, typer.Argument(help="Folder of models, or of one: STORE/MODEL.")],
    address: Annotated[str, typer.Argument(help="oci://HOST/REPOSITORY:TAG", metavar="ADDRESS")],
) -> None:
    """Push a model store to a container registry (CNCF ModelPack).

    `graphkiln serve --model-store ADDRESS` serves it from there. Signatures (`graphkiln sign`) are included.
    Credentials are those of `docker login`.
    """
    from graphkiln.cli.options import open_stores
    from graphkiln_backend.repository.model_pack import push_store
    from graphkiln_backend.storage.address import RemoteAddress

    target = RemoteAddress.parse(address)
    if target is None:
        raise RepositoryError(f"'{address}' is not an address", hint="oci://HOST/REPOSITORY:TAG")
    with open_stores([store]) as (folder,):
        pushed = push_store(folder, target)
    typer.echo(f"{target}: {pushed.files} files, {pushed.size_bytes / 1e6:.1f} MB, {pushed.digest}")


def pull(
    address: Annotated[
        str, typer.Argument(help="oci://HOST/REPOSITORY:TAG, s3://BUCKET/STORE, ..., or a model in it: ADDRESS/NAME.")
    ],
    store: Annotated[Path, typer.Argument(help="Folder of models; created if missing.")],
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Pull models from a registry or object store into a folder.

    The counterpart of `graphkiln push`. Existing files stay; a different file under the same name is refused before
    anything is changed. With --trusted-keys, versions that none of the keys has signed are refused, too.
    """
    from graphkiln_backend.repository.remote_model import list_store
    from graphkiln_backend.repository.signing_keys import TrustedKeys
    from graphkiln_backend.storage.address import RemoteAddress

    source = RemoteAddress.parse(address)
    if source is None:
        raise RepositoryError(
            f"'{address}' is not an address", hint="oci://HOST/REPOSITORY:TAG, s3://BUCKET/STORE, ..."
        )
    if trusted_keys:
        TrustedKeys.read(trusted_keys)  # report errors in the keys before the download
    listed = list_store(source)
    with _staging_folder(store) as folder:
        fetched = listed.fetch(store, folder)
        for version in fetched.versions() if trusted_keys else ():
            _check_signed(version, trusted_keys)
        pulled = fetched.place()
    what = f"{pulled.files} new files, {pulled.size_bytes / 1e6:.1f} MB" if pulled.files else "nothing is new"
    typer.echo(f"{store}: {what} ({', '.join(pulled.models)} of {source})")


@contextmanager
def _staging_folder(store: Path) -> Iterator[Path]:
    """Create a hidden folder in a store; remove those of killed pulls first."""
    from graphkiln_backend.system.owned_folder import OwnedFolder, remove_dead

    try:
        store.mkdir(parents=True, exist_ok=True)
        remove_dead(store, _HIDDEN)
        staging = OwnedFolder(store, _HIDDEN)
    except (OSError, ServerSetupError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        words = cause.strerror if isinstance(cause, OSError) else error
        raise RepositoryError(f"{store} cannot be written: {words}", hint="pull into another folder") from error
    with staging:
        yield staging.path


def _check_signed(version: Path, trusted_keys: Path | None) -> None:
    from graphkiln.cli.sign import check_signers

    try:
        check_signers(version, trusted_keys)
    except GraphkilnError as error:
        words = f"{version.parent.name} version {version.name} is not pulled: {error.message}"
        raise RepositoryError(words, hint=error.hint) from error
