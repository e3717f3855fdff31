"""Signed statements about the files of a version, stored as `attestation.json` in the version folder.

A statement lists the SHA-256 of every file that affects serving: the files of the version, including its manifest, and
the files that all versions of the model share (config.pbtxt, labels). It also names the model and the version, so that
an old version cannot be presented as a new one, or one model as another. Hidden files are not part of a version.

The file is a DSSE envelope around an in-toto statement, so that other tools can read and verify it. Sources: DSSE 1.0.2
(protocol.md, envelope.md); in-toto Attestation Framework, Statement v1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import MIB, open_regular, read_text
from graphkiln_backend.repository.signing_keys import SigningKey, TrustedKeys, is_signed, short
from graphkiln_backend.repository.stores import walk
from graphkiln_backend.repository.version_folders import version_folders, visible

ATTESTATION_FILE = "attestation.json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "urn:graphkiln:model-version:v1"
_LIMIT = 16 * MIB
_NAMED = 3
HOW_TO_SIGN = "graphkiln sign STORE/MODEL --key FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Content of an attestation.

    Attributes:
        files: Path relative to the model's folder, such as `1/model.onnx` -> SHA-256, hexadecimal.
    """

    model: str
    version: int
    files: Mapping[str, str]

    def to_payload(self) -> bytes:
        """Serialize as an in-toto statement; equal files give equal bytes."""
        document = {
            "_type": _STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(self.files.items())],
            "predicateType": _PREDICATE_TYPE,
            "predicate": {"model": self.model, "version": self.version},
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> Statement:
        """Read an in-toto statement.

        Raises:
            ManifestError: The payload is not a statement of this type.
        """
        try:
            document = json.loads(payload)
            kinds = document["_type"], document["predicateType"]
            if kinds != (_STATEMENT_TYPE, _PREDICATE_TYPE):
                raise ManifestError(f"unsupported statement type: {kinds[1]}", hint=HOW_TO_SIGN)
            about = document["predicate"]
            files = {str(each["name"]): str(each["digest"]["sha256"]) for each in document["subject"]}
            return cls(model=str(about["model"]), version=int(about["version"]), files=files)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError("the statement is damaged", hint=HOW_TO_SIGN) from error


@dataclass(frozen=True, slots=True)
class Attestation:
    """A statement and its signatures.

    Attributes:
        payload: The serialized statement, byte for byte as signed.
        signatures: Key id -> signature, not verified; see `signers`.
    """

    payload: bytes
    signatures: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, version: Path) -> Attestation | None:
        """Read the attestation of a version folder, or return None.

        Raises:
            ManifestError: The file is damaged.
            OSError: The file cannot be read.
        """
        path = version / ATTESTATION_FILE
        try:
            document = json.loads(read_text(path, _LIMIT))
            if document["payloadType"] != _PAYLOAD_TYPE:
                raise ManifestError(f"{path}: unsupported payload type {document['payloadType']}", hint=HOW_TO_SIGN)
            signatures = {str(each["keyid"]): _decode(each["sig"]) for each in document["signatures"]}
            return cls(_decode(document["payload"]), signatures)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError(f"{path} is damaged", hint=HOW_TO_SIGN) from error

    def write(self, version: Path) -> None:
        """Write the attestation into a version folder atomically.

        Raises:
            OSError: The file cannot be written.
        """
        document = {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [
                {"keyid": key_id, "sig": base64.b64encode(signature).decode()}
                for key_id, signature in sorted(self.signatures.items())
            ],
        }
        part = version / f".{ATTESTATION_FILE}"
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(version / ATTESTATION_FILE)

    def signers(self) -> list[str]:
        """Return the ids of the keys whose signatures are valid."""
        message = _to_sign(self.payload)
        return [key_id for key_id, signature in self.signatures.items() if is_signed(key_id, message, signature)]

    def signed_by(self, key: SigningKey) -> Attestation:
        """Return a copy with a signature by this key added."""
        return Attestation(self.payload, {**self.signatures, key.key_id: key.sign(_to_sign(self.payload))})


def sign_version(model: Path, version: int, key: SigningKey) -> Statement:
    """Sign the files of a version. Signatures by other keys are kept if the files have not changed.

    Args:
        model: The model's folder.
        version: The version's number.
        key: The private key to sign with.

    Raises:
        RepositoryError: A file cannot be read.
        OSError: The attestation cannot be written.
    """
    statement = describe(model, version)
    folder = model / str(version)
    try:
        before = Attestation.read(folder)
    except ManifestError:  # damaged: write a new one
        before = None
    payload = statement.to_payload()
    kept = before if before and before.payload == payload else Attestation(payload)
    kept.signed_by(key).write(folder)
    return statement


def describe(model: Path, version: int) -> Statement:
    """Hash the files of a version and return a statement about them.

    Raises:
        RepositoryError: A file cannot be read.
    """
    files = {name: _hash(path) for name, path in signable_files(model, version).items()}
    return Statement(model=model.name, version=version, files=files)


def signable_files(model: Path, version: int) -> dict[str, Path]:
    """Return the files that affect the serving of a version, by path relative to the model's folder.

    Raises:
        RepositoryError: A folder cannot be listed.
    """
    try:
        entries = visible(model)
        others = set(version_folders(entries).values()) - {model / str(version)}
        walked = [each for root in entries if root not in others for each in walk(root)]
    except OSError as error:
        raise RepositoryError(f"{error.filename or model} cannot be read: {error.strerror or error}") from error
    own = model / str(version) / ATTESTATION_FILE
    files = sorted(path for path, status in walked if path != own and not stat.S_ISDIR(status.st_mode))
    return {path.relative_to(model).as_posix(): path for path in files}


def find_signer(model: Path, version: int, trusted: TrustedKeys) -> tuple[Statement, str]:
    """Find a statement by a trusted key about a version, without reading the version's files.

    Args:
        model: The model's folder.
        version: The version's number.
        trusted: The trusted public keys.

    Returns:
        The statement and the id of the trusted key that signed it.

    Raises:
        RepositoryError: There is no attestation, no trusted key signed it, it is about another version, or the lists of
            files differ.
        ManifestError: The attestation is damaged.
        OSError: The attestation cannot be read.
    """
    attestation = Attestation.read(model / str(version))
    if attestation is None:
        raise RepositoryError("it is not signed", hint=HOW_TO_SIGN)
    signers = attestation.signers()
    key_id = next((key_id for key_id in signers if key_id in trusted.names), "")
    if not key_id:
        names = ", ".join(map(short, signers))
        raise RepositoryError(
            f"it is signed by {names}, which is not trusted" if names else "its signature is not valid",
            hint=f"{HOW_TO_SIGN}, with one of the keys {', '.join(map(short, trusted.names))}",
        )
    statement = Statement.from_payload(attestation.payload)
    check_statement(statement, model, version)
    return statement, key_id


def check_statement(statement: Statement, model: Path, version: int) -> None:
    """Check that a statement is about a version and lists exactly its files, without reading the files.

    Raises:
        RepositoryError: The model, the version or the list of files differs.
    """
    if (statement.model, statement.version) != (model.name, version):
        raise RepositoryError(
            f"it was signed as {statement.model} version {statement.version}",
            hint=f"if this is intended, sign it again: {HOW_TO_SIGN}",
        )
    found = signable_files(model, version).keys()
    missing, unsigned = statement.files.keys() - found, found - statement.files.keys()
    if missing or unsigned:
        differences = (f"{_list(missing)} missing" if missing else "", f"{_list(unsigned)} added" if unsigned else "")
        raise RepositoryError(
            f"its files differ from those that were signed: {', '.join(filter(None, differences))}", hint=HOW_TO_SIGN
        )


def check_files(statement: Statement, model: Path) -> None:
    """Compare all files with their signed digests.

    Raises:
        RepositoryError: A digest differs, or a file cannot be read.
    """
    for name, sha256 in statement.files.items():
        check_hash(name, _hash(model / name), sha256)


def check_hash(name: str, found: str, signed: str) -> None:
    """Compare the digest of a file with the signed one.

    Raises:
        RepositoryError: The digests differ.
    """
    if found != signed:
        raise RepositoryError(
            f"{name} is not the file that was signed: expected SHA-256 {signed[:12]}..., got {found[:12]}...",
            hint=f"restore the file, or sign the version again: {HOW_TO_SIGN}",
        )


def hash_stream(source: BinaryIO, pass_on: Callable[[bytes], Any] = lambda _: None) -> str:
    """Compute the SHA-256 of the rest of a stream, hexadecimal.

    Args:
        source: The stream.
        pass_on: Called with each chunk.
    """
    digest = hashlib.sha256()
    while chunk := source.read(MIB):
        digest.update(chunk)
        pass_on(chunk)
    return digest.hexdigest()


def _hash(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hash_stream(file)
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read: {error.strerror or error}") from error


def _to_sign(payload: bytes) -> bytes:
    """Encode a payload for signing. Source: DSSE 1.0.2, "Pre-Authentication Encoding"."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _list(names: set[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
