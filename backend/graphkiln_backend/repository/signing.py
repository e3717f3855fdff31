"""Signatures of versions in the format of OpenSSF Model Signing 1.0, stored as `model.sig` in the version folder.

A signature lists the SHA-256 of every file that affects serving: the files of the version, including its manifest, and
the files that all versions of the model share (config.pbtxt, labels). Names are relative to the model's folder, whose
name is signed, too, so that an old version cannot be presented as a new one, or one model as another. Hidden files are
neither signed nor served.

The library `model_signing` signs and verifies; its command line verifies what is signed here, and the reverse. It
imports a thousand modules, therefore it is imported where it is needed.

Source: OpenSSF Model Signing, "Model Signing Format" (Sigstore bundle, DSSE envelope, in-toto statement).
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import MIB, open_regular, read_text
from graphkiln_backend.repository import attestation
from graphkiln_backend.repository.attestation import ATTESTATION_FILE
from graphkiln_backend.repository.signing_keys import HOW_TO_SIGN, SigningKey, TrustedKeys, Verifier, short
from graphkiln_backend.repository.stores import walk
from graphkiln_backend.repository.version_folders import is_ignored, is_version, version_folders, visible

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from model_signing import hashing

SIGNATURE_FILE = "model.sig"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_LIMIT = 16 * MIB
_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Content of a signature.

    Attributes:
        model: Name of the model's folder when it was signed.
        version: Number of the version, in the old format only.
        files: Path relative to the model's folder, such as `1/model.onnx` -> SHA-256, hexadecimal.
        signer: The signer, in words.
    """

    model: str
    version: int | None = None
    files: Mapping[str, str]
    signer: str


def sign_version(model: Path, version: int, key: SigningKey) -> Statement:
    """Sign the files of a version. An earlier signature is replaced.

    Args:
        model: The model's folder.
        version: The version's number.
        key: The private key to sign with.

    Raises:
        RepositoryError: A file cannot be read or signed.
        OSError: The signature cannot be written.
    """
    from model_signing import signing

    files = list(signable_files(model, version).values())
    hidden = [path.relative_to(model) for path in model.rglob("*") if is_ignored(path.name)]
    others = [path.name for number, path in version_folders(visible(model)).items() if number != version]
    # Named in the signature, so that other tools verify the same files.
    ignored = [*hidden, *others, SIGNATURE_FILE, f"{version}/{SIGNATURE_FILE}", f"{version}/{ATTESTATION_FILE}"]
    folder = model / str(version)
    part = folder / f".{SIGNATURE_FILE}"
    try:
        config = signing.Config()
        if key.certificate:
            # The library does not accept an empty chain; a certificate that is there twice changes nothing.
            chain = key.chain or [key.certificate]
            config.use_certificate_signer(
                private_key=key.file, signing_certificate=key.certificate, certificate_chain=chain
            )
        else:
            # Annotated as a str, but handed to cryptography, which takes bytes.
            config.use_elliptic_key_signer(private_key=key.file, password=key.passphrase)  # type: ignore[arg-type]
        config.set_hashing_config(_listing(files, map(str, ignored))).sign(model, part)
        part.replace(folder / SIGNATURE_FILE)
    except (ValueError, TypeError) as error:
        raise RepositoryError(f"{folder} cannot be signed: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    (folder / ATTESTATION_FILE).unlink(missing_ok=True)
    words = f"by {short(key.key_id)}" + (f" with {key.certificate.name}" if key.certificate else "")
    return replace(_read(folder / SIGNATURE_FILE, version)[1], signer=words)


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
    files = {path.relative_to(model).as_posix(): path for path, status in walked if not stat.S_ISDIR(status.st_mode)}
    return {name: files[name] for name in sorted(files) if _is_covered(name, version)}


def _is_covered(name: str, version: int) -> bool:
    """Return false for hidden files, signatures and files of other versions."""
    first, *rest = parts = name.split("/")
    if any(map(is_ignored, parts)) or name == SIGNATURE_FILE or (rest and is_version(first) and first != str(version)):
        return False
    return name not in {f"{version}/{SIGNATURE_FILE}", f"{version}/{ATTESTATION_FILE}"}


def is_signed(model: Path, version: int) -> bool:
    """Return true if a version has a signature, valid or not."""
    return _place(model, version) is not None


def _place(model: Path, version: int) -> Path | None:
    """The signature of a version, or of the whole model."""
    own = model / str(version)
    places = (own / SIGNATURE_FILE, own / ATTESTATION_FILE, model / SIGNATURE_FILE)
    return next((path for path in places if path.exists()), None)


def find_signer(model: Path, version: int, trusted: TrustedKeys | None) -> Statement:
    """Find the signature of a version by a trusted signer, without reading the version's files.

    Args:
        model: The model's folder.
        version: The version's number.
        trusted: The trusted signers; None to take what is listed, by whomever.

    Raises:
        RepositoryError: No trusted signer signed it, it is about another version, or the lists of files differ.
        ManifestError: The signature is damaged.
        OSError: The signature cannot be read.
    """
    place = _place(model, version)
    if place is None:
        raise RepositoryError("it is not signed", hint=HOW_TO_SIGN)
    if place.name == ATTESTATION_FILE:
        statement = Statement(**attestation.read(place, trusted.names if trusted else None))
    else:
        bundle, statement = _read(place, version)
        statement = replace(statement, signer=_check(bundle, trusted))
    if statement.model != model.name or statement.version not in {None, version}:
        number = f" version {statement.version}" if statement.version else ""
        raise RepositoryError(
            f"it was signed as {statement.model}{number}", hint=f"if this is intended, sign it again: {HOW_TO_SIGN}"
        )
    found = signable_files(model, version).keys()
    missing, unsigned = statement.files.keys() - found, found - statement.files.keys()
    if missing or unsigned:
        differences = (f"{_list(missing)} missing" if missing else "", f"{_list(unsigned)} added" if unsigned else "")
        raise RepositoryError(
            f"its files differ from those that were signed: {', '.join(filter(None, differences))}", hint=HOW_TO_SIGN
        )
    return statement


def check_files(statement: Statement, model: Path) -> None:
    """Compare all files with their signed digests.

    Raises:
        RepositoryError: A digest differs, or a file cannot be read.
    """
    for name, sha256 in statement.files.items():
        try:
            with open_regular(model / name) as file:
                check_hash(name, hash_stream(file), sha256)
        except OSError as error:
            raise RepositoryError(f"{model / name} cannot be read: {error.strerror or error}") from error


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
    """Compute the SHA-256 of the rest of a stream, hexadecimal; `pass_on` is called with each chunk."""
    digest = hashlib.sha256()
    while chunk := source.read(MIB):
        digest.update(chunk)
        pass_on(chunk)
    return digest.hexdigest()


def _read(path: Path, version: int) -> tuple[dict[str, Any], Statement]:
    """Read a signature without verifying it.

    Returns:
        The bundle with those parts only that are read here, and the statement. Exactly these parts are verified later:
        no second reading of the file, or of a field with two names, can differ from what was verified.

    Raises:
        ManifestError: It is damaged, or of another kind.
        OSError: It cannot be read.
    """
    try:
        document = json.loads(read_text(path, _LIMIT))
        envelope = {key: document["dsseEnvelope"][key] for key in ("payload", "payloadType", "signatures")}
        material = dict(document["verificationMaterial"])
        bundle = {"mediaType": document["mediaType"], "verificationMaterial": material, "dsseEnvelope": envelope}
        payload = json.loads(base64.b64decode(envelope["payload"], validate=True))
        kind, predicate = payload["predicateType"], payload["predicate"]
        serialization = predicate.get("serialization", {})
        how = serialization.get("method"), serialization.get("hash_type")
        if (kind, how) != (_PREDICATE_TYPE, ("files", "sha256")):
            raise ManifestError(
                f"{path}: unsupported statement {kind} of {how[0]} by {how[1]}, expected files by sha256",
                hint=HOW_TO_SIGN,
            )
        (subject,) = payload["subject"]
        files = {str(each["name"]): str(each["digest"]) for each in predicate["resources"]}
        covered = {name: files[name] for name in sorted(files) if _is_covered(name, version)}
        return bundle, Statement(model=str(subject["name"]), files=covered, signer="")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged", hint=HOW_TO_SIGN) from error


def _check(bundle: Mapping[str, Any], trusted: TrustedKeys | None) -> str:
    """Verify a signature; return the signer in words.

    Raises:
        RepositoryError: It is not valid, or by a signer that is not trusted.
    """
    material = bundle["verificationMaterial"]
    kind, key_id = "sigstore", ""
    claim = "by Sigstore"
    if "publicKey" in material:
        kind, key_id = "elliptic_key", str((material["publicKey"] or {}).get("hint") or "")
        claim = f"by {short(key_id) or 'a key'}"
    elif "x509CertificateChain" in material:
        kind, chain = "certificate", _chain(material)
        claim = f"by {_subject(chain[0])}"
    if trusted is None:
        return f"{claim}, not checked"
    known = ", ".join(each.words for each in trusted.verifiers) or "no key of this format is trusted"
    refused = RepositoryError(f"it is signed {claim}, which is not trusted", hint=f"{HOW_TO_SIGN}; trusted: {known}")
    for verifier in trusted.verifiers:
        if verifier.kind != kind or (key_id and key_id != verifier.key_id):
            continue
        try:
            if kind == "certificate":
                _check_dates(chain, trusted)
            _verify(bundle, verifier)
        except RepositoryError as error:
            refused = error
        else:
            return claim if kind == "certificate" else f"by {verifier.words}"
    raise refused


def _chain(material: Mapping[str, Any]) -> list[Certificate]:
    """Certificates of a signature, the signer's first."""
    from cryptography.x509 import load_der_x509_certificate

    try:
        listed = material["x509CertificateChain"]["certificates"]
        first, *others = [load_der_x509_certificate(base64.b64decode(each["rawBytes"])) for each in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise RepositoryError("its certificate is damaged", hint=HOW_TO_SIGN) from error
    return [first, *others]


def _check_dates(chain: Iterable[Certificate], trusted: TrustedKeys) -> None:
    """Refuse certificates that have ended, which the library accepts because signatures have no time, and revoked ones.

    Raises:
        RepositoryError: One of them has ended, is not valid yet, or is revoked.
    """
    for each in chain:
        begin, end = each.not_valid_before_utc, each.not_valid_after_utc
        if not begin <= datetime.now(UTC) <= end:
            raise RepositoryError(
                f"the certificate {_subject(each)} is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}",
                hint="sign the version again, with a certificate that is valid today",
            )
        lists = (revoked for revoked in trusted.revoked if revoked.issuer == each.issuer)
        if any(revoked.get_revoked_certificate_by_serial_number(each.serial_number) for revoked in lists):
            raise RepositoryError(f"the certificate {_subject(each)} is revoked", hint=HOW_TO_SIGN)


class _ValidSignatureError(Exception):
    """Ends the library's work when the signature is valid: files are compared while they are copied."""


def _verify(bundle: Mapping[str, Any], verifier: Verifier) -> None:
    """Verify a signature, not the files.

    Raises:
        RepositoryError: It is not valid.
    """
    from model_signing import verifying

    with ExitStack() as stack:

        def as_file(content: bytes) -> Path:  # the library takes paths only
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="graphkiln-"))
            file.write(content)
            file.flush()
            return Path(file.name)

        options: dict[str, Any] = {
            name: as_file(value) if isinstance(value, bytes) else value for name, value in verifier.options.items()
        }
        if verifier.kind == "certificate":
            options["certificate_chain"] = [options["certificate_chain"]]
        signature = as_file(json.dumps(bundle).encode())
        try:
            config = getattr(verifying.Config(), f"use_{verifier.kind}_verifier")(**options)
            config.set_hashing_config(_listing(None)).verify(signature.parent, signature)
        except _ValidSignatureError:
            return
        except Exception as error:  # of five libraries
            words = str(error) or type(error).__name__
            raise RepositoryError(f"its signature is not valid: {words.splitlines()[0]}", hint=HOW_TO_SIGN) from error
    raise RepositoryError("its signature was not verified")


def _listing(files: list[Path] | None, ignored: Iterable[str] = ()) -> hashing.Config:
    """Configuration of the library with exactly these files; None to end when they are asked for."""
    from model_signing import hashing, manifest

    class Listing(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:
            del files_to_hash
            if files is None:
                raise _ValidSignatureError
            return super().hash(model_path, files_to_hash=files)

    listing: hashing.Config = Listing()  # type: ignore[no-untyped-call]
    return listing.set_ignored_paths(paths=ignored, ignore_git_paths=False).set_allow_symlinks(True)


def _subject(certificate: Certificate) -> str:
    return certificate.subject.rfc4514_string()


def _list(names: set[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
