"""Keys that sign model versions, and keys, certificates and identities that a server trusts.

A private key is a PEM file of the curve P-256, P-384 or P-521, made by `graphkiln keygen` or by `openssl ecparam`. A
public key is a PEM file as `openssl pkey -pubout` prints it. No network access is needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import MIB, can_others_read, read_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import CertificateRevocationList

_T = TypeVar("_T")
_log = logging.getLogger("graphkiln.repository")

HOW_TO_SIGN = "graphkiln sign STORE/MODEL --key FILE"
PUBLIC_SUFFIX = ".pub"
IDENTITY_SUFFIX = ".sigstore.json"
_LIMIT = MIB
_SHOWN = 16
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_EXPECTED = "an EC key of the curve P-256, P-384 or P-521"
_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_HOW_TO_MAKE = "graphkiln keygen FILE makes a pair: FILE signs, FILE.pub is trusted"


def short(key_id: str) -> str:
    """Abbreviate a key id to the first 16 of its 64 hexadecimal digits."""
    return key_id[:_SHOWN]


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key that was read, and can sign.

    Attributes:
        file: Its file, in PEM.
        key_id: SHA-256 of the public key in PEM, hexadecimal, as signatures name it.
        passphrase: Opens the file; None if it is not encrypted.
        certificate: File of the key's certificate, in PEM, to sign with; None to sign with the key alone.
        chain: Files of the certificates between it and the trusted authority.
    """

    file: Path
    key_id: str
    passphrase: bytes | None = field(default=None, repr=False)
    certificate: Path | None = None
    chain: Sequence[Path] = ()

    @classmethod
    def read(
        cls,
        file: Path,
        passphrase: bytes | None = None,
        *,
        certificate: Path | None = None,
        chain: Sequence[Path] = (),
    ) -> SigningKey:
        """Read a private key.

        Raises:
            RepositoryError: The file cannot be read or holds no private key that can sign, or the passphrase is wrong.
        """
        require_library()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        text = _read(file)
        try:
            private: Any = load_pem_private_key(text.encode(), passphrase or None)
        except TypeError as error:  # a passphrase for an unencrypted key, or no passphrase for an encrypted one
            hint = "give its passphrase: --passphrase-file FILE" if passphrase is None else "leave the passphrase out"
            raise RepositoryError(f"the private key {file} cannot be opened: {error}", hint=hint) from error
        except ValueError as error:
            what = "opened with this passphrase" if "ENCRYPTED" in text else "read"
            raise RepositoryError(
                f"{file} cannot be {what}: expected a private key in PEM", hint=_HOW_TO_MAKE
            ) from error
        key_id = _key_id(private.public_key(), file)
        if not passphrase and can_others_read(file):
            _log.warning("other users can read the private key %s and sign with it: chmod 600 %s", file, file)
        return cls(file, key_id, passphrase, certificate, tuple(chain))


def generate_key_pair(file: Path, passphrase: bytes | None = None) -> str:
    """Write a new private key, readable only by its owner, and its public key; returns the key's id.

    Args:
        file: File for the private key. The public key is written to the same name with `.pub` appended.
        passphrase: Encrypts the private key; None leaves it unencrypted.

    Raises:
        RepositoryError: One of the files already exists or cannot be written.
    """
    require_library()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    private = generate_private_key(SECP256R1())
    encryption = form.BestAvailableEncryption(passphrase) if passphrase else form.NoEncryption()
    secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)
    public = _public_pem(private.public_key())
    written: list[Path] = []
    for path, content, mode in ((file, secret, 0o600), (public_file(file), public, 0o644)):
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as target:
                written.append(path)
                target.write(content)
        except OSError as error:
            for half in written:  # a key without its other half is useless
                half.unlink(missing_ok=True)
            hint = (
                "choose another file: existing keys are not overwritten" if isinstance(error, FileExistsError) else ""
            )
            raise RepositoryError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
    return hashlib.sha256(public).hexdigest()


def public_file(private: Path) -> Path:
    """Path of the public key that belongs to a private key's file."""
    return private.with_name(private.name + PUBLIC_SUFFIX)


@dataclass(frozen=True, slots=True)
class Verifier:
    """A signer, or many, as the library verifies them.

    Attributes:
        kind: `elliptic_key`, `certificate` or `sigstore`.
        words: Who is trusted.
        options: Options of the library; bytes are the content of a file.
        key_id: Id of the key; empty for the other kinds.
    """

    kind: str
    words: str
    options: Mapping[str, bytes | str]
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Keys, certificates and identities that a server trusts.

    Attributes:
        names: Key id -> name of the file that holds it; also of Ed25519 keys, which signed in the old format.
        verifiers: Whose signatures are accepted.
        revoked: Lists of revoked certificates.
    """

    names: dict[str, str] = field(default_factory=dict)
    verifiers: list[Verifier] = field(default_factory=list)
    revoked: list[CertificateRevocationList] = field(default_factory=list)

    @classmethod
    def read(cls, place: Path) -> TrustedKeys:
        """Read public keys, certificates and revocation lists of a file, or of all `*.pub` and `*.pem` in a folder.

        Also identities of Sigstore, `*.sigstore.json`.

        Raises:
            RepositoryError: A file cannot be read, holds nothing of this kind, or holds a private key.
        """
        require_library()
        trusted, authorities = cls(), b""
        for file in key_files(place):
            if file.name.endswith(IDENTITY_SUFFIX):
                trusted.verifiers.append(_read_identity(file))
            else:
                authorities += trusted._add(file)
        if authorities:
            trusted.verifiers.append(Verifier("certificate", "certificates", {"certificate_chain": authorities}))
        if not (trusted.names or trusted.verifiers):
            raise RepositoryError(f"no public key in {place}: expected *.pub or *.pem files", hint=_HOW_TO_MAKE)
        return trusted

    def _add(self, file: Path) -> bytes:
        """Add what a file holds; return its certificates."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        text = _read(file)
        if "PRIVATE KEY-----" in text:
            raise RepositoryError(
                f"{file} holds a private key, expected a public one: private keys do not belong on a server",
                hint=f"copy {public_file(file).name} to the server",
            )
        blocks = [(match[1], match[0].encode() + b"\n") for match in _PEM_BLOCK.finditer(text)]
        if not blocks:
            raise RepositoryError(f"{file} holds no public key in PEM format", hint=_HOW_TO_MAKE)
        authorities = b""
        for kind, block in blocks:
            if kind == "CERTIFICATE":
                end = _load(x509.load_pem_x509_certificate, block, file).not_valid_after_utc
                if end < datetime.now(UTC):
                    raise RepositoryError(
                        f"the certificate in {file} ended on {end:%Y-%m-%d}", hint="remove or renew it"
                    )
                authorities += block
            elif kind == "X509 CRL":
                self.revoked.append(_load(x509.load_pem_x509_crl, block, file))
            elif isinstance(public := _load(load_pem_public_key, block, file), Ed25519PublicKey):
                self.names[public.public_bytes_raw().hex()] = file.stem
            else:
                key_id = _key_id(public, file)
                self.names[key_id], words = file.stem, f"{file.stem} ({short(key_id)})"
                self.verifiers.append(Verifier("elliptic_key", words, {"public_key": block}, key_id))
        return authorities


def _read_identity(file: Path) -> Verifier:
    try:
        document = json.loads(_read(file))
        identity, issuer, config = (str(document[key]) for key in ("identity", "issuer", "trust_config"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RepositoryError(
            f"{file} is no identity of Sigstore",
            hint='expected {"identity": ADDRESS, "issuer": URL, "trust_config": FILE}',
        ) from error
    options: dict[str, bytes | str] = {"identity": identity, "oidc_issuer": issuer}
    options["trust_config"] = _read(file.parent / config).encode()
    return Verifier("sigstore", f"{identity} ({issuer})", options)


def key_files(place: Path) -> list[Path]:
    """List key files: `*.pub`, `*.pem` and `*.sigstore.json` of a folder, or the path itself if it is a file.

    Raises:
        RepositoryError: The folder cannot be read.
    """
    try:
        if not place.is_dir():
            return [place]
        return sorted(path for path in place.iterdir() if path.name.endswith((PUBLIC_SUFFIX, ".pem", IDENTITY_SUFFIX)))
    except OSError as error:
        raise _unreadable(f"the keys in {place}", error) from error


def require_library() -> None:
    """Check that signing and verifying are installed.

    Raises:
        RepositoryError: They are not.
    """
    if find_spec("model_signing") is None:
        raise RepositoryError(
            "signing and verifying need the package 'model-signing'", hint="pip install 'graphkiln[sign]'"
        )


def _load(load: Callable[[bytes], _T], block: bytes, file: Path) -> _T:
    try:
        return load(block)
    except ValueError as error:
        raise RepositoryError(
            f"{file} holds a public key or certificate that cannot be read", hint=_HOW_TO_MAKE
        ) from error


def _key_id(public: Any, file: Path) -> str:
    """Id of a public key: SHA-256 of its PEM.

    Raises:
        RepositoryError: It is of a kind that Model Signing does not know.
    """
    curve = getattr(getattr(public, "curve", None), "name", "")
    if curve not in _CURVES:
        kind = curve or type(public).__name__.strip("_").removesuffix("PublicKey")
        raise RepositoryError(f"{file} holds a key of type {kind}, expected {_EXPECTED}", hint=_HOW_TO_MAKE)
    return hashlib.sha256(_public_pem(public)).hexdigest()


def _public_pem(public: EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _read(file: Path) -> str:
    try:
        return read_text(file, _LIMIT)
    except OSError as error:
        raise _unreadable(f"the key {file}", error) from error
    except UnicodeDecodeError as error:
        raise RepositoryError(f"{file} is not a key in PEM format", hint=_HOW_TO_MAKE) from error


def _unreadable(what: str, error: OSError) -> RepositoryError:
    hint = "check the permissions of the file" if isinstance(error, PermissionError) else _HOW_TO_MAKE
    return RepositoryError(f"{what} cannot be read: {error.strerror or error}", hint=hint)
