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
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import MIB, read_text
from graphkiln_backend.repository.signing_keys import short

ATTESTATION_FILE = "attestation.json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_PREDICATE_TYPE = "urn:graphkiln:model-version:v1"
_HOW_TO_SIGN = "graphkiln sign STORE/MODEL --key FILE"
_LIMIT = 16 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class OldStatement:
    """Content of an attestation with a valid signature.

    Attributes:
        files: Path relative to the model's folder -> SHA-256, hexadecimal.
        signer: The signer, in words.
    """

    model: str
    version: int
    files: Mapping[str, str]
    signer: str


def read(version: Path, names: Mapping[str, str] | None) -> OldStatement | None:
    """Read the attestation of a version folder and verify its signature.

    Args:
        version: The version folder.
        names: Trusted keys: id -> name. None for any key.

    Returns:
        The statement; None if there is no attestation.

    Raises:
        RepositoryError: No signature is valid, or none is by a trusted key.
        ManifestError: The file is damaged.
        OSError: The file cannot be read.
    """
    path = version / ATTESTATION_FILE
    try:
        envelope = json.loads(read_text(path, _LIMIT))
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = {
            str(each["keyid"]): base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]
        }
        document = json.loads(payload)
        if (kinds := (envelope["payloadType"], document["predicateType"])) != (_PAYLOAD_TYPE, _PREDICATE_TYPE):
            raise ManifestError(f"{path}: unsupported statement {kinds[1]}", hint=_HOW_TO_SIGN)
        about = document["predicate"]
        files = {str(each["name"]): str(each["digest"]["sha256"]) for each in document["subject"]}
        model, number = str(about["model"]), int(about["version"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged", hint=_HOW_TO_SIGN) from error
    # DSSE 1.0.2, "Pre-Authentication Encoding".
    message = b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)
    valid = [key_id for key_id, signature in signatures.items() if _is_signed(key_id, message, signature)]
    if not valid:
        raise RepositoryError("its signature is not valid", hint=_HOW_TO_SIGN)
    signers = valid if names is None else [f"{names[key_id]} ({short(key_id)})" for key_id in valid if key_id in names]
    if not signers:
        words = ", ".join(map(short, valid))
        raise RepositoryError(f"it is signed by {words}, which is not trusted", hint=_HOW_TO_SIGN)
    signer = f"by {', '.join(map(short, signers) if names is None else signers)}"
    return OldStatement(model=model, version=number, files=files, signer=signer)


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
