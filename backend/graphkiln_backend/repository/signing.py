"""Signatures of versions in the format of OpenSSF Model Signing 1.0, stored as `model.sig` in the version folder.

A signature lists the SHA-256 of every file that affects serving: the files of the version, including its manifest, and
the files that all versions of the model share (config.pbtxt, labels). Names are relative to the model's folder, whose
name is signed, too, so that an old version cannot be presented as a new one, or one model as another. Hidden files are
neither signed nor served.

The library `model_signing` signs and checks signatures; its command line verifies what is signed here, and the reverse.
It imports a thousand modules, therefore it is imported where it is needed.

Source: OpenSSF Model Signing, "Model Signing Format" (Sigstore bundle, DSSE envelope, in-toto statement).
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import MIB, open_regular, read_text
from graphkiln_backend.repository import attestation
from graphkiln_backend.repository.attestation import ATTESTATION_FILE
from graphkiln_backend.repository.signing_keys import SigningKey, TrustedKeys, short
from graphkiln_backend.repository.stores import walk
from graphkiln_backend.repository.version_folders import is_ignored, is_version, version_folders, visible

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from model_signing import hashing

SIGNATURE_FILE = "model.sig"
HOW_TO_SIGN = "graphkiln sign STORE/MODEL --key FILE"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_OLD_KIND = "in graphkiln's old format: sign it again"
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

    files = signable_files(model, version)
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
        config.set_hashing_config(_listing(list(files.values()), _not_signed(model, version))).sign(model, part)
        part.replace(folder / SIGNATURE_FILE)
    except ValueError as error:
        raise RepositoryError(f"{folder} cannot be signed: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    (folder / ATTESTATION_FILE).unlink(missing_ok=True)
    return _read(folder / SIGNATURE_FILE, version).statement(key.words)


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


def _not_signed(model: Path, version: int) -> list[str]:
    """Paths to name in the signature as ignored, so that other tools verify the same files."""
    hidden = [path.relative_to(model) for path in model.rglob("*") if is_ignored(path.name)]
    others = [path.name for number, path in version_folders(visible(model)).items() if number != version]
    return [*map(str, hidden), *others, SIGNATURE_FILE, *(f"{version}/{n}" for n in (SIGNATURE_FILE, ATTESTATION_FILE))]


def find_signer(model: Path, version: int, trusted: TrustedKeys) -> Statement:
    """Find the signature of a version by a trusted signer, without reading the version's files.

    Args:
        model: The model's folder.
        version: The version's number.
        trusted: The trusted public keys.

    Raises:
        RepositoryError: No trusted key signed it, it is about another version, or the lists of files differ.
        ManifestError: The signature is damaged.
        OSError: The signature cannot be read.
    """
    if found := find_statement(model, version, trusted):
        return found
    raise RepositoryError("it is not signed", hint=HOW_TO_SIGN)


def find_statement(model: Path, version: int, trusted: TrustedKeys | None) -> Statement | None:
    """Find the signature of a version; as `find_signer`, but None if there is none.

    Without trusted keys, what it lists is returned, and nothing is known of who wrote the list.
    """
    if place := _place(model, version):
        signature = _read(place, version)
        found = signature.statement(_check(signature, trusted) if trusted else f"{signature.claim}, not checked")
    elif old := attestation.read(model / str(version), trusted.names if trusted else None):
        signer = f"{old.signer}, {_OLD_KIND}"
        found = Statement(model=old.model, version=old.version, files=old.files, signer=signer)
    else:
        return None
    _check_statement(found, model, version)
    return found


def is_signed(model: Path, version: int) -> bool:
    """Return true if a version has a signature, valid or not."""
    return _place(model, version) is not None or (model / str(version) / ATTESTATION_FILE).exists()


def _place(model: Path, version: int) -> Path | None:
    """The signature of a version, or of the whole model if the version has none of either format."""
    own = model / str(version)
    places = [own / SIGNATURE_FILE] + ([] if (own / ATTESTATION_FILE).exists() else [model / SIGNATURE_FILE])
    return next((path for path in places if path.exists()), None)


def _check_statement(statement: Statement, model: Path, version: int) -> None:
    """Check that a statement is about a version and lists exactly its files, without reading the files."""
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


# The file.


@dataclass(frozen=True, slots=True)
class _Signature:
    """A signature as it was read, not verified.

    Attributes:
        bundle: Its parts that are read here: exactly these are verified, so that no second reading of the file, or of
            a field with two names, can differ from what was verified.
        model: Name of the signed folder.
        files: The signed files that belong to the version.
    """

    bundle: Mapping[str, Any]
    model: str
    files: Mapping[str, str]

    def statement(self, signer: str) -> Statement:
        return Statement(model=self.model, files=self.files, signer=signer)

    @property
    def material(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.bundle["verificationMaterial"]
        return found

    @property
    def hint(self) -> str:
        """Id of the key; empty if the signature was not made by a key, or does not say."""
        return str((self.material.get("publicKey") or {}).get("hint") or "")

    @property
    def claim(self) -> str:
        """The signer as named by the signature itself."""
        if "publicKey" in self.material:
            return f"by {short(self.hint) or 'a key'}"
        return "by Sigstore" if "certificate" in self.material else f"by {_subject(self.chain()[0])}"

    def chain(self) -> list[Certificate]:
        """Certificates, the signer's first."""
        from cryptography.x509 import load_der_x509_certificate

        try:
            listed = self.material["x509CertificateChain"]["certificates"]
            chain = [load_der_x509_certificate(base64.b64decode(each["rawBytes"])) for each in listed]
        except (ValueError, KeyError, TypeError) as error:
            raise RepositoryError("its certificate is damaged", hint=HOW_TO_SIGN) from error
        if not chain:
            raise RepositoryError("its signature has no certificate", hint=HOW_TO_SIGN)
        return chain


def _read(path: Path, version: int) -> _Signature:
    """Read a signature.

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
        if (kind := payload["predicateType"]) != _PREDICATE_TYPE:
            raise ManifestError(f"{path}: unsupported statement {kind}, expected {_PREDICATE_TYPE}", hint=HOW_TO_SIGN)
        (subject,), predicate = payload["subject"], payload["predicate"]
        how = predicate["serialization"]["method"], predicate["serialization"]["hash_type"]
        if how != ("files", "sha256"):
            raise ManifestError(
                f"{path} lists {how[0]} by {how[1]}, expected files by sha256",
                hint="sign without options for shards and hashes",
            )
        files = {str(each["name"]): str(each["digest"]) for each in predicate["resources"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged", hint=HOW_TO_SIGN) from error
    signed = {name: sha256 for name, sha256 in sorted(files.items()) if _is_covered(name, version)}
    return _Signature(bundle, str(subject["name"]), signed)


# Verifying.


def _check(signature: _Signature, trusted: TrustedKeys) -> str:
    """Verify a signature; return the trusted signer in words.

    Raises:
        RepositoryError: It is not valid, or by a signer that is not trusted.
    """
    material = signature.material
    if "publicKey" in material:
        return _check_key(signature, trusted)
    if "x509CertificateChain" in material:
        return _check_certificates(signature, trusted)
    if "certificate" in material:
        return _check_identity(signature, trusted)
    raise RepositoryError("its signature is of an unknown kind, expected a key or a certificate", hint=HOW_TO_SIGN)


def _check_key(signature: _Signature, trusted: TrustedKeys) -> str:
    claimed = {signature.hint} if signature.hint else trusted.keys.keys()
    refused = _not_trusted(signature.claim, trusted)
    for key_id in trusted.keys.keys() & claimed:
        with _as_file(trusted.keys[key_id]) as file:
            try:
                _verify(signature, "elliptic_key", public_key=file)
            except RepositoryError as error:
                refused = error
            else:
                return f"by {trusted.names[key_id]} ({short(key_id)})"
    raise refused


def _check_certificates(signature: _Signature, trusted: TrustedKeys) -> str:
    chain = signature.chain()
    if not trusted.authorities:
        raise _not_trusted(signature.claim, trusted)
    now = datetime.now(UTC)
    for each in chain:
        # The library compares with the time at which the signer's certificate begins, because signatures have no time.
        if not each.not_valid_before_utc <= now <= each.not_valid_after_utc:
            raise RepositoryError(
                f"the certificate {_subject(each)} is valid from {each.not_valid_before_utc:%Y-%m-%d} to "
                f"{each.not_valid_after_utc:%Y-%m-%d}",
                hint="sign the version again, with a certificate that is valid today",
            )
        if any(
            revoked.issuer == each.issuer and revoked.get_revoked_certificate_by_serial_number(each.serial_number)
            for revoked in trusted.revoked
        ):
            raise RepositoryError(f"the certificate {_subject(each)} is revoked", hint=HOW_TO_SIGN)
    with _as_file(b"".join(trusted.authorities)) as file:
        _verify(signature, "certificate", certificate_chain=[file])
    return signature.claim


def _check_identity(signature: _Signature, trusted: TrustedKeys) -> str:
    refused = _not_trusted(signature.claim, trusted)
    for each in trusted.identities:
        with _as_file(each.trust_config) as file:
            try:
                _verify(signature, "sigstore", identity=each.identity, oidc_issuer=each.issuer, trust_config=file)
            except RepositoryError as error:
                refused = error
            else:
                return f"by {each.identity} ({each.issuer})"
    raise refused


def _not_trusted(words: str, trusted: TrustedKeys) -> RepositoryError:
    known = [*map(short, trusted.names), *(each.identity for each in trusted.identities)]
    return RepositoryError(
        f"it is signed {words}, which is not trusted",
        hint=f"{HOW_TO_SIGN}, with one of {', '.join(known)}" if known else HOW_TO_SIGN,
    )


class _ValidSignatureError(Exception):
    """Ends the library's work when the signature is valid: files are compared while they are copied."""


def _verify(signature: _Signature, kind: str, **trust: Any) -> None:
    """Verify a signature, not the files.

    Args:
        signature: The signature.
        kind: Name of the library's verifier.
        trust: Its options.

    Raises:
        RepositoryError: It is not valid.
    """
    from model_signing import verifying

    with _as_file(json.dumps(signature.bundle).encode()) as file:
        try:
            config = getattr(verifying.Config(), f"use_{kind}_verifier")(**trust)
            config.set_hashing_config(_listing(None)).verify(file.parent, file)
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


@contextmanager
def _as_file(content: bytes) -> Iterator[Path]:
    """Write bytes into a file for the library, which takes paths only."""
    with tempfile.NamedTemporaryFile(prefix="graphkiln-") as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def _subject(certificate: Certificate) -> str:
    return certificate.subject.rfc4514_string()


def _list(names: set[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
