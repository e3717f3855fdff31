"""Signatures as graphkiln wrote them before it took over Model Signing: read, no longer written.

`attestation.json` in a version folder is a DSSE envelope around an in-toto statement, signed by Ed25519 keys whose ids
are the public keys themselves. Sources: DSSE 1.0.2 (protocol.md, envelope.md); in-toto Attestation, Statement v1;
RFC 8032 (Ed25519).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import MIB, read_text
from graphkiln_backend.repository.signing_keys import HOW_TO_SIGN, short

ATTESTATION_FILE = "attestation.json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_PREDICATE_TYPE = "urn:graphkiln:model-version:v1"
_LIMIT = 16 * MIB


def read(path: Path, names: Mapping[str, str] | None) -> dict[str, Any]:
    """Read an attestation and verify its signature.

    Args:
        path: The file.
        names: Trusted keys: id -> name. None for any key.

    Returns:
        The fields of `signing.Statement`.

    Raises:
        RepositoryError: No signature is valid, or none is by a trusted key.
        ManifestError: The file is damaged.
        OSError: The file cannot be read.
    """
    try:
        envelope = json.loads(read_text(path, _LIMIT))
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = {
            str(each["keyid"]): base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]
        }
        document = json.loads(payload)
        if (kinds := (envelope["payloadType"], document["predicateType"])) != (_PAYLOAD_TYPE, _PREDICATE_TYPE):
            raise ManifestError(f"{path}: unsupported statement {kinds[1]}", hint=HOW_TO_SIGN)
        about = document["predicate"]
        files = {str(each["name"]): str(each["digest"]["sha256"]) for each in document["subject"]}
        model, number = str(about["model"]), int(about["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged", hint=HOW_TO_SIGN) from error
    # DSSE 1.0.2, "Pre-Authentication Encoding".
    message = b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)
    valid = [key_id for key_id, signature in signatures.items() if _is_signed(key_id, message, signature)]
    if not valid:
        raise RepositoryError("its signature is not valid", hint=HOW_TO_SIGN)
    signers = (
        [f"{names[key_id]} ({short(key_id)})" for key_id in valid if key_id in names]
        if names is not None
        else [short(key_id) for key_id in valid]
    )
    if not signers:
        words = ", ".join(map(short, valid))
        raise RepositoryError(f"it is signed by {words}, which is not trusted", hint=HOW_TO_SIGN)
    signer = f"by {', '.join(signers)}, in graphkiln's old format: sign it again"
    return {"model": model, "version": number, "files": files, "signer": signer}


def _is_signed(key_id: str, message: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not re.fullmatch("[0-9a-f]{64}", key_id):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key_id)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
