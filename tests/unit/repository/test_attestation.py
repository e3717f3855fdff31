"""Signed statements about versions: what they cover, and what invalidates them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from signed import SignedStore, make_key

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.repository.attestation import (
    ATTESTATION_FILE,
    Attestation,
    check_files,
    describe,
    find_signer,
    sign_version,
)
from graphkiln_backend.repository.signing_keys import TrustedKeys


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


def check(store: SignedStore, model: Path, version: int = 1) -> str:
    statement, key_id = find_signer(model, version, store.trusted)
    check_files(statement, model)
    return key_id


def test_statement_lists_the_files_of_one_version(signed: SignedStore) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    (model / "1" / "weights").mkdir()
    (model / "1" / "weights" / "w.bin").write_bytes(b"w")
    (model / ".hidden").write_text("not part of it")
    (model / "lost+found").mkdir()
    (model / "lost+found" / "42").write_text("nor this")
    files = describe(model, 1).files
    assert sorted(files) == ["1/model.onnx", "1/weights/w.bin", "config.pbtxt"]
    assert files["1/model.onnx"] == hashlib.sha256(b"one").hexdigest()


def test_envelope_is_standard_dsse(signed: SignedStore) -> None:
    model = signed.add(1, "one")
    envelope = json.loads((model / "1" / ATTESTATION_FILE).read_text())
    attestation = Attestation.read(model / "1")
    assert attestation
    payload = attestation.payload
    encoded = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    (signature,) = attestation.signatures.values()
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed.key.key_id)).verify(signature, encoded)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert json.loads(payload)["subject"][0].keys() == {"name", "digest"}


@pytest.mark.parametrize("name", ["1/model.onnx", "config.pbtxt"])
def test_altered_file_with_old_size_and_time(signed: SignedStore, name: str) -> None:
    model = signed.add(1, "one")
    status = (model / name).stat()
    (model / name).write_bytes((model / name).read_bytes()[:-1] + b"X")
    os.utime(model / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(RepositoryError, match=f"{name} is not the file that was signed"):
        check(signed, model)


def test_added_and_missing_files(signed: SignedStore) -> None:
    model = signed.add(1, "one")
    (model / "1" / "more.bin").write_bytes(b"")
    (model / "labels.txt").write_text("cat\n")
    (model / "config.pbtxt").unlink()
    with pytest.raises(RepositoryError, match=r"config.pbtxt missing, 1/more.bin, labels.txt added"):
        check(signed, model)


def test_renamed_version_or_model(signed: SignedStore) -> None:
    model = signed.add(1, "one")
    (model / "1").rename(model / "2")
    with pytest.raises(RepositoryError, match="signed as m version 1"):
        check(signed, model, 2)
    (model / "2").rename(model / "1")
    other = model.rename(model.with_name("n"))
    with pytest.raises(RepositoryError, match="signed as m version 1"):
        check(signed, other)


def test_attestation_copied_from_another_version(signed: SignedStore) -> None:
    """Also where the files are the same, byte by byte."""
    model = signed.add(1, "one")
    signed.add(2, "one", signed=False)
    shutil.copy(model / "1" / ATTESTATION_FILE, model / "2")
    with pytest.raises(RepositoryError, match="signed as m version 1"):
        check(signed, model, 2)


def test_one_trusted_key_is_enough(signed: SignedStore, tmp_path: Path) -> None:
    second, _ = make_key(tmp_path / "second")
    model = signed.add(1, "one", key=second)
    both = TrustedKeys({signed.key.key_id: "release", second.key_id: "second"})
    assert find_signer(model, 1, both)[1] == second.key_id
    with pytest.raises(RepositoryError, match=f"signed by {second.key_id[:16]}, which is not trusted"):
        find_signer(model, 1, signed.trusted)


def test_linked_files_are_signed_by_content(signed: SignedStore, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_text("w")
    model = signed.add(1, "one", signed=False)
    (model / "1" / "weights.bin").symlink_to(weights)
    statement = sign_version(model, 1, signed.key)
    assert statement.files["1/weights.bin"] == hashlib.sha256(b"w").hexdigest()
    weights.write_text("x")
    with pytest.raises(RepositoryError, match=r"1/weights\.bin is not the file that was signed"):
        check(signed, model)


def test_trusted_signature_is_required(signed: SignedStore, tmp_path: Path) -> None:
    stranger, _ = make_key(tmp_path / "stranger")
    model = signed.add(1, "one", key=stranger)
    with pytest.raises(RepositoryError, match="which is not trusted"):
        check(signed, model)
    sign_version(model, 1, signed.key)
    assert check(signed, model) == signed.key.key_id
    attestation = Attestation.read(model / "1")
    assert attestation
    assert set(attestation.signers()) == {stranger.key_id, signed.key.key_id}
    (model / "1" / ATTESTATION_FILE).unlink()
    with pytest.raises(RepositoryError, match="it is not signed"):
        check(signed, model)


def test_forged_key_id(signed: SignedStore, tmp_path: Path) -> None:
    stranger, _ = make_key(tmp_path / "stranger")
    model = signed.add(1, "one", key=stranger)
    forged = Attestation.read(model / "1")
    assert forged
    Attestation(forged.payload, {signed.key.key_id: forged.signatures[stranger.key_id]}).write(model / "1")
    with pytest.raises(RepositoryError, match="not valid"):
        check(signed, model)


def test_signing_drops_signatures_of_other_content(signed: SignedStore, tmp_path: Path) -> None:
    stranger, _ = make_key(tmp_path / "stranger")
    model = signed.add(1, "one", key=stranger)
    (model / "1" / "model.onnx").write_text("two")
    sign_version(model, 1, signed.key)
    attestation = Attestation.read(model / "1")
    assert attestation
    assert attestation.signers() == [signed.key.key_id]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"payloadType": "x"}', "[" * 100_000])
def test_damaged_attestation(signed: SignedStore, content: str) -> None:
    model = signed.add(1, "one")
    (model / "1" / ATTESTATION_FILE).write_text(content)
    with pytest.raises(ManifestError, match=r"attestation.json( is damaged|: unsupported)"):
        check(signed, model)


def test_pipe_does_not_block(signed: SignedStore) -> None:
    model = signed.add(1, "one")
    (model / "1" / "model.onnx").unlink()
    os.mkfifo(model / "1" / "model.onnx")
    with pytest.raises(RepositoryError, match="a pipe"):
        check(signed, model)
