"""Ed25519 keys: private keys to sign model versions, public keys that a server trusts.

A private key is a PEM file (PKCS #8, optionally encrypted with a passphrase), made by `graphkiln keygen` or by
`openssl genpkey -algorithm ed25519`. A public key is a PEM file as `openssl pkey -pubout` prints it. No network access
is needed.

Source: RFC 8032 (Ed25519), RFC 8410 (its keys in PKCS #8 and SubjectPublicKeyInfo).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import MIB, can_others_read, read_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_log = logging.getLogger("graphkiln.repository")

PUBLIC_SUFFIX = ".pub"
_LIMIT = MIB
_SHOWN = 16
_HEX_DIGITS = 64
_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_HOW_TO_MAKE = "graphkiln keygen FILE makes a pair: FILE signs, FILE.pub is trusted"


def short(key_id: str) -> str:
    """Abbreviate a key id to the first 16 of its 64 hexadecimal digits."""
    return key_id[:_SHOWN]


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private Ed25519 key."""

    private: Ed25519PrivateKey

    @property
    def key_id(self) -> str:
        """The 32 bytes of the public key, hexadecimal."""
        return self.private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> bytes:
        """Sign a message; returns 64 bytes."""
        return self.private.sign(message)

    @classmethod
    def read(cls, file: Path, passphrase: bytes | None = None) -> SigningKey:
        """Read a private key.

        Raises:
            RepositoryError: The file cannot be read or holds no Ed25519 private key, or the passphrase is wrong.
        """
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        text = _read(file)
        try:
            private = load_pem_private_key(text.encode(), passphrase or None)
        except TypeError as error:  # a passphrase for an unencrypted key, or no passphrase for an encrypted one
            hint = "give its passphrase: --passphrase-file FILE" if passphrase is None else "leave the passphrase out"
            raise RepositoryError(f"the private key {file} cannot be opened: {error}", hint=hint) from error
        except ValueError as error:
            what = "opened with this passphrase" if "ENCRYPTED" in text else "read"
            raise RepositoryError(
                f"{file} cannot be {what}: expected a private key in PEM", hint=_HOW_TO_MAKE
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            kind = type(private).__name__.strip("_")
            raise RepositoryError(f"{file} holds a key of type {kind}, expected Ed25519", hint=_HOW_TO_MAKE)
        if not passphrase and can_others_read(file):
            _log.warning("other users can read the private key %s and sign with it: chmod 600 %s", file, file)
        return cls(private)


def generate_key_pair(file: Path, passphrase: bytes | None = None) -> str:
    """Write a new private key, readable only by its owner, and its public key; returns the key's id.

    Args:
        file: File for the private key. The public key is written to the same name with `.pub` appended.
        passphrase: Encrypts the private key; None leaves it unencrypted.

    Raises:
        RepositoryError: One of the files already exists or cannot be written.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    encryption = form.BestAvailableEncryption(passphrase) if passphrase else form.NoEncryption()
    secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)
    public = private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
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
    return private.public_key().public_bytes_raw().hex()


def public_file(private: Path) -> Path:
    """Path of the public key that belongs to a private key's file."""
    return private.with_name(private.name + PUBLIC_SUFFIX)


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Trusted public keys.

    Attributes:
        names: Key id -> name of the file that holds it.
    """

    names: Mapping[str, str]

    @classmethod
    def read(cls, place: Path) -> TrustedKeys:
        """Read the public keys of a file, or of all `*.pub` and `*.pem` in a folder.

        Raises:
            RepositoryError: A file cannot be read, holds no public Ed25519 key, or holds a private key.
        """
        _require_cryptography()
        names = {key_id: file.stem for file in key_files(place) for key_id in _public_keys(file)}
        if not names:
            raise RepositoryError(f"no public key in {place}: expected *.pub or *.pem files", hint=_HOW_TO_MAKE)
        return cls(names)


def is_signed(key_id: str, message: bytes, signature: bytes) -> bool:
    """Verify a signature; False for an invalid key."""
    _require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not re.fullmatch(f"[0-9a-f]{{{_HEX_DIGITS}}}", key_id):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key_id)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_files(place: Path) -> list[Path]:
    """List key files: all `*.pub` and `*.pem` files of a folder, or the path itself if it is a file.

    Raises:
        RepositoryError: The folder cannot be read.
    """
    try:
        if not place.is_dir():
            return [place]
        return sorted(path for path in place.iterdir() if path.suffix in {PUBLIC_SUFFIX, ".pem"})
    except OSError as error:
        raise _unreadable(f"the keys in {place}", error) from error


def _public_keys(file: Path) -> Iterator[str]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    text = _read(file)
    if "PRIVATE KEY-----" in text:
        raise RepositoryError(
            f"{file} holds a private key, expected a public one: private keys do not belong on a server",
            hint=f"copy {public_file(file).name} to the server",
        )
    blocks = [match.group() for match in _PEM_BLOCK.finditer(text)]
    if not blocks:
        raise RepositoryError(f"{file} holds no public key in PEM format", hint=_HOW_TO_MAKE)
    for block in blocks:
        try:
            public = load_pem_public_key(block.encode())
        except ValueError as error:
            raise RepositoryError(f"{file} holds a public key that cannot be read", hint=_HOW_TO_MAKE) from error
        if not isinstance(public, Ed25519PublicKey):
            raise RepositoryError(f"{file} holds a key of another type, expected Ed25519", hint=_HOW_TO_MAKE)
        yield public.public_bytes_raw().hex()


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


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise RepositoryError(
            "signing and verifying need the package 'cryptography'", hint="pip install 'graphkiln[sign]'"
        ) from error
