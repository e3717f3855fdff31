"""`graphkiln sign` and `graphkiln keygen`: sign versions for `serve --trusted-keys`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError

if TYPE_CHECKING:
    from graphkiln_backend.repository.signing_keys import SigningKey

NOT_SIGNED = "no"

TrustedKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--trusted-keys",
        "--signed-by",
        help="Public keys or certificates in PEM, a file or a folder of *.pub and *.pem: require a signature by one.",
        metavar="FILE|DIR",
    ),
]
_PASSPHRASE_BYTES = 4096

PassphraseFile = Annotated[
    Path | None, typer.Option(help="File whose first line is the private key's passphrase.", metavar="FILE")
]


def sign(
    models: Annotated[
        list[str],
        typer.Argument(help="STORE/MODEL for all of its versions, STORE/MODEL:VERSION for one.", metavar="MODEL..."),
    ],
    key: Annotated[Path, typer.Option(help="Private key in PEM, as created by graphkiln keygen.", metavar="FILE")],
    passphrase_file: PassphraseFile = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate of the key, in PEM, to sign with.", metavar="FILE")
    ] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option(help="Certificates between it and the trusted authority, in PEM.", metavar="FILE"),
    ] = None,
) -> None:
    """Sign the files of versions (OpenSSF Model Signing).

    The signature covers the SHA-256 of every file of the version and of files that the model's versions share, such as
    config.pbtxt: after a change of these, sign all versions again. It is stored in the version's model.sig.
    """
    from graphkiln_backend.repository.signing import sign_version

    signing = read_key(key, passphrase_file, certificate=certificate, chain=chain or ())
    chosen = [(model, version) for text in models for model, versions in [versions_of(text)] for version in versions]
    for model, version in chosen:
        statement = sign_version(model, version, signing)
        typer.echo(f"{model.name} version {version}: {len(statement.files)} files signed {statement.signer}")


def read_key(
    file: Path, passphrase_file: Path | None, *, certificate: Path | None = None, chain: Sequence[Path] = ()
) -> SigningKey:
    """Read a private key.

    Raises:
        RepositoryError: It cannot be read, or cannot sign.
    """
    from graphkiln_backend.repository.signing_keys import SigningKey

    return SigningKey.read(file, _passphrase(passphrase_file), certificate=certificate, chain=chain)


def keygen(
    file: Annotated[Path, typer.Argument(help="File for the private key; the public key is written to FILE.pub.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Create a pair of keys of the curve P-256 for signing versions.

    Keep the private key where no server can read it. Give FILE.pub to `serve --trusted-keys`.
    """
    from graphkiln_backend.repository.signing_keys import generate_key_pair, public_file, short

    key_id = generate_key_pair(file, _passphrase(passphrase_file))
    typer.echo(f"{file} signs, {public_file(file)} is trusted: key {short(key_id)}")


def versions_of(text: str) -> tuple[Path, list[int]]:
    """Parse `STORE/MODEL`, `STORE/MODEL:VERSION` or a version folder into a model folder and versions.

    Raises:
        RepositoryError: There is no such model or version on this machine.
    """
    from graphkiln_backend.repository.version import newest_version
    from graphkiln_backend.repository.version_folders import version_folders, version_number
    from graphkiln_backend.storage.address import parse_store

    if not isinstance(parse_store(text), Path):
        raise RepositoryError(f"{text} is not on this machine", hint="sign the files here, then upload them")
    before, colon, after = text.rpartition(":")
    number = version_number(after) if colon else None
    model = Path(os.path.abspath(before if number is not None else text))  # noqa: PTH100 - a link keeps its name
    if number is None and version_number(model.name) is not None and not version_folders(model.iterdir()):
        model, number = model.parent, version_number(model.name)
    newest_version(model)  # raises if this is not a model
    found = list(version_folders(model.iterdir()))
    if number is not None and number not in found:
        has = ", ".join(map(str, found))
        raise RepositoryError(f"{model.name} has no version {number}", hint=f"it has {has}")
    return model, found if number is None else [number]


def _passphrase(file: Path | None) -> bytes | None:
    from graphkiln_backend.graph.files import read_bytes

    if file is None:
        return None
    try:
        lines = read_bytes(file, _PASSPHRASE_BYTES).splitlines()
    except OSError as error:
        raise RepositoryError(f"--passphrase-file {file} cannot be read: {error.strerror or error}") from error
    if not lines or not lines[0]:
        raise RepositoryError(f"--passphrase-file {file} is empty", hint="its first line is the passphrase")
    return lines[0]


# Signers of a version, as `verify`, `inspect` and `pull` check and print them.


def check_signers(version: Path, trusted: Path | None) -> str:
    """Check a version's files against its signature, and describe the signer.

    Args:
        version: The version folder.
        trusted: Public keys, one of which must have signed; None if no signature is required.

    Raises:
        RepositoryError: Files differ from the signature, or no trusted key has signed.
        ManifestError: The signature is damaged.
    """
    from graphkiln_backend.repository.signing import check_files, find_signer, is_signed
    from graphkiln_backend.repository.signing_keys import TrustedKeys

    version = version.absolute()
    model, number = version.parent, int(version.name)
    if not trusted and not is_signed(model, number):
        return NOT_SIGNED
    statement = find_signer(model, number, TrustedKeys.read(trusted) if trusted else None)
    check_files(statement, model)
    return statement.signer


def describe_signers(version: Path, trusted: Path | None) -> str:
    """Describe the signers for a table; a failed check becomes part of the text."""
    try:
        return check_signers(version, trusted)
    except (GraphkilnError, OSError) as error:
        return f"not these files: {error}"
