"""Signers of a version, as `verify` and `inspect` print them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.graph.errors import GraphkilnError

NOT_SIGNED = "no"

TrustedKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--trusted-keys",
        help="Public keys in PEM, a file or a folder of *.pub: whose signature counts.",
        metavar="FILE|DIR",
    ),
]


def check_signers(version: Path, trusted: Path | None) -> str:
    """Check a version's files against its signature, and describe the signers.

    Args:
        version: The version folder.
        trusted: Public keys, one of which must have signed; None if no signature is required.

    Raises:
        RepositoryError: Files are not as they were signed, or no trusted key has signed.
        ManifestError: The attestation is damaged.
    """
    from graphkiln_backend.graph.errors import RepositoryError
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
        raise RepositoryError("its signature does not hold", hint=HOW_TO_SIGN)
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
