"""`graphkiln sign` and `graphkiln keygen`: sign versions for `serve --trusted-keys`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError

NOT_SIGNED = "no"

TrustedKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--trusted-keys",
        help="Public keys in PEM, a file or a folder of *.pub: require a signature by one of them.",
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
) -> None:
    """Sign the files of versions.

    The signature covers the SHA-256 of every file of the version and of files that the model's versions share, such as
    config.pbtxt: after a change of these, sign all versions again. It is stored in the version's attestation.json.
    """
    from graphkiln_backend.repository.attestation import sign_version
    from graphkiln_backend.repository.signing_keys import SigningKey, short

    signing = SigningKey.read(key, _passphrase(passphrase_file))
    chosen = [(model, version) for text in models for model, versions in [versions_of(text)] for version in versions]
    for model, version in chosen:
        statement = sign_version(model, version, signing)
        words = f"{model.name} version {version}: {len(statement.files)} files signed by {short(signing.key_id)}"
        typer.echo(words)


def keygen(
    file: Annotated[Path, typer.Argument(help="File for the private key; the public key is written to FILE.pub.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Create a pair of Ed25519 keys for signing versions.

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
    """Check a version's files against its signature, and describe the signers.

    Args:
        version: The version folder.
        trusted: Public keys, one of which must have signed; None if no signature is required.

    Raises:
        RepositoryError: Files differ from the signature, or no trusted key has signed.
        ManifestError: The attestation is damaged.
    """
    from graphkiln_backend.repository.attestation import (
        HOW_TO_SIGN,
        Attestation,
        Statement,
        check_files,
        check_statement,
        find_signer,
    )
    from graphkiln_backend.repository.signing_keys import TrustedKeys, short

    version = version.absolute()
    model, number = version.parent, int(version.name)
    if trusted:
        keys = TrustedKeys.read(trusted)
        statement, key_id = find_signer(model, number, keys)
        check_files(statement, model)
        return f"by {keys.names[key_id]} ({short(key_id)})"
    attestation = Attestation.read(version)
    if attestation is None:
        return NOT_SIGNED
    signers = attestation.signers()
    if not signers:
        raise RepositoryError("its signature is not valid", hint=HOW_TO_SIGN)
    statement = Statement.from_payload(attestation.payload)
    check_statement(statement, model, number)
    check_files(statement, model)
    return f"by {', '.join(map(short, signers))}"


def describe_signers(version: Path, trusted: Path | None) -> str:
    """Describe the signers for a table; a failed check becomes part of the text."""
    try:
        return check_signers(version, trusted)
    except (GraphkilnError, OSError) as error:
        return f"not these files: {error}"
