"""Signing keys: created, read, refused."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from signed import Authority

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import signing_keys as module
from graphkiln_backend.repository.signing_keys import (
    SigningKey,
    TrustedKeys,
    generate_key_pair,
    public_file,
)


def test_key_pair(tmp_path: Path) -> None:
    key_id = generate_key_pair(tmp_path / "release")
    key = SigningKey.read(tmp_path / "release")
    assert key.key_id == key_id
    assert TrustedKeys.read(public_file(tmp_path / "release")).names == {key_id: "release"}
    assert (tmp_path / "release").stat().st_mode & 0o077 == 0


def test_key_from_openssl(tmp_path: Path) -> None:
    private, public = tmp_path / "a.key", tmp_path / "a.pem"
    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")
    subprocess.run(["openssl", "genpkey", *curve, "-out", private], check=True)
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


@pytest.mark.parametrize(
    ("options", "kind"),
    [(("EC", "-pkeyopt", "ec_paramgen_curve:secp256k1"), "secp256k1"), (("RSA",), "RSA"), (("ed25519",), "Ed25519")],
)
def test_keys_of_another_type(tmp_path: Path, options: tuple[str, ...], kind: str) -> None:
    """Ed25519 keys signed in the old format: they are trusted, but sign no more."""
    private, public = tmp_path / "other", tmp_path / "other.pub"
    subprocess.run(["openssl", "genpkey", "-quiet", "-algorithm", *options, "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    with pytest.raises(RepositoryError, match=f"key of type {kind}, expected an EC key"):
        SigningKey.read(private)
    if kind == "Ed25519":
        assert list(TrustedKeys.read(public).names.values()) == ["other"]
        return
    with pytest.raises(RepositoryError, match=f"key of type {kind}, expected an EC key"):
        TrustedKeys.read(public)


def test_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    generate_key_pair(tmp_path / "encrypted", b"secret")
    authority.revoke(authority.certify("release"))
    trusted = TrustedKeys.read(tmp_path)
    assert [each.kind for each in trusted.verifiers] == ["elliptic_key", "certificate"]
    assert (list(trusted.names.values()), len(trusted.revoked)) == (["encrypted"], 1)
    ended = authority.certify("former", datetime(2026, 1, 2, tzinfo=UTC)).certificate
    assert ended
    with pytest.raises(RepositoryError, match=r"the certificate in .*former\.crt ended on 2026-01-02"):
        TrustedKeys.read(ended)
    authority.trusted.write_text(authority.trusted.read_text().replace("M", "N"))
    with pytest.raises(RepositoryError, match="certificate that cannot be read"):
        TrustedKeys.read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"identity": "a", "issuer": "b"}'])
def test_damaged_identity(tmp_path: Path, content: str) -> None:
    (tmp_path / "ann.sigstore.json").write_text(content)
    with pytest.raises(RepositoryError, match="no identity of Sigstore"):
        TrustedKeys.read(tmp_path)


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(RepositoryError, match="model-signing") as raised:
        TrustedKeys.read(tmp_path)
    assert "graphkiln[sign]" in raised.value.hint


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
