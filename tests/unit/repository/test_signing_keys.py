"""Signing keys: created, read, refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import signing_keys as module
from graphkiln_backend.repository.signing_keys import (
    SigningKey,
    TrustedKeys,
    generate_key_pair,
    is_signed,
    public_file,
)

# RFC 8032, 7.1, test 2.
PUBLIC = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_example_of_the_rfc() -> None:
    assert is_signed(PUBLIC, b"\x72", SIGNATURE)
    assert not is_signed(PUBLIC, b"\x73", SIGNATURE)
    assert not is_signed(PUBLIC[:-2], b"\x72", SIGNATURE)
    assert not is_signed(PUBLIC, b"\x72", SIGNATURE[:-1])


def test_key_pair(tmp_path: Path) -> None:
    key_id = generate_key_pair(tmp_path / "release")
    key = SigningKey.read(tmp_path / "release")
    assert key.key_id == key_id
    assert is_signed(key_id, b"words", key.sign(b"words"))
    assert TrustedKeys.read(public_file(tmp_path / "release")).names == {key_id: "release"}
    assert (tmp_path / "release").stat().st_mode & 0o077 == 0


def test_key_from_openssl(tmp_path: Path) -> None:
    private, public = tmp_path / "a.key", tmp_path / "a.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    assert TrustedKeys.read(public).names == {SigningKey.read(private).key_id: "a"}


def test_several_public_keys(tmp_path: Path) -> None:
    ids = {generate_key_pair(tmp_path / name): name for name in ("anna", "ben")}
    assert TrustedKeys.read(tmp_path).names == ids
    both = tmp_path / "both"
    both.write_text("".join(public_file(tmp_path / name).read_text() for name in ("anna", "ben")))
    assert set(TrustedKeys.read(both).names) == set(ids)


def test_existing_keys_are_not_overwritten(tmp_path: Path) -> None:
    generate_key_pair(tmp_path / "release")
    before = (tmp_path / "release").read_bytes()
    with pytest.raises(RepositoryError, match="not overwritten"):
        generate_key_pair(tmp_path / "release")
    (tmp_path / "release").unlink()
    with pytest.raises(RepositoryError, match=r"release\.pub cannot be written"):
        generate_key_pair(tmp_path / "release")
    assert before
    assert not (tmp_path / "release").exists()


def test_passphrase(tmp_path: Path) -> None:
    key_id = generate_key_pair(tmp_path / "release", b"secret")
    assert SigningKey.read(tmp_path / "release", b"secret").key_id == key_id
    with pytest.raises(RepositoryError, match="--passphrase-file"):
        SigningKey.read(tmp_path / "release")
    with pytest.raises(RepositoryError, match="opened with this passphrase"):
        SigningKey.read(tmp_path / "release", b"other")


def test_invalid_keys(tmp_path: Path) -> None:
    generate_key_pair(tmp_path / "release")
    with pytest.raises(RepositoryError, match="cannot be read: expected a private key"):
        SigningKey.read(public_file(tmp_path / "release"))
    with pytest.raises(RepositoryError, match=r"copy release\.pub"):
        TrustedKeys.read(tmp_path / "release")
    with pytest.raises(RepositoryError, match="cannot be read: No such file"):
        TrustedKeys.read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match="no public key"):
        TrustedKeys.read(tmp_path / "empty")


@pytest.mark.parametrize("what", ["is_dir", "iterdir", "open"])
def test_unreadable_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    generate_key_pair(tmp_path / "release")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    if what == "open":
        monkeypatch.setattr(module, "read_text", refuse)
    else:
        monkeypatch.setattr(Path, what, refuse)
    (tmp_path / "release").unlink()
    with pytest.raises(RepositoryError, match="cannot be read: Permission denied") as raised:
        TrustedKeys.read(tmp_path)
    assert raised.value.hint == "check the permissions of the file"


def test_keys_of_another_type(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    private, public = tmp_path / "ec", tmp_path / "ec.pub"
    private.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(RepositoryError, match="expected Ed25519"):
        SigningKey.read(private)
    with pytest.raises(RepositoryError, match="expected Ed25519"):
        TrustedKeys.read(public)


@pytest.mark.parametrize(
    ("mode", "passphrase", "warned"), [(0o644, None, True), (0o600, None, False), (0o644, b"p", False)]
)
def test_warning_for_a_readable_private_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, passphrase: bytes | None, warned: bool
) -> None:
    generate_key_pair(tmp_path / "release", passphrase)
    (tmp_path / "release").chmod(mode)
    SigningKey.read(tmp_path / "release", passphrase)
    assert ("other users can read" in caplog.text) is warned
