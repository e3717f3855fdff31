"""`sign` and `keygen`, and the signers that `verify` and `inspect` print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from signed import SignedStore, make_key
from tiny import convert, run

from graphkiln.cli.sign import NOT_SIGNED, check_signers, versions_of
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.attestation import Attestation


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    store = SignedStore.make(tmp_path)
    for version in (1, 2):
        store.add(version, "text", signed=False)
    return store


def signers(model: Path, version: int) -> list[str]:
    attestation = Attestation.read(model / str(version))
    return attestation.signers() if attestation else []


def test_one_version_or_all(signed: SignedStore, tmp_path: Path) -> None:
    model = signed.folder / "m"
    finished = run("sign", f"{model}:2", "--key", tmp_path / "release")
    assert finished.output == f"m version 2: 2 files signed by {signed.key.key_id[:16]}\n"
    assert (signers(model, 1), signers(model, 2)) == ([], [signed.key.key_id])
    run("sign", model, "--key", tmp_path / "release")
    assert signers(model, 1) == [signed.key.key_id]


def test_a_key_with_a_passphrase(signed: SignedStore, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("correct horse\n")
    made = run("keygen", tmp_path / "k", "--passphrase-file", tmp_path / "words")
    assert made.exit_code == 0, made.output
    assert "k.pub is trusted" in made.output.replace("\n", "")
    assert isinstance(run("sign", signed.folder / "m", "--key", tmp_path / "k").exception, RepositoryError)
    opened = run("sign", signed.folder / "m", "--key", tmp_path / "k", "--passphrase-file", tmp_path / "words")
    assert opened.exit_code == 0, opened.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m:3", "m has no version 3 (it has 1, 2)"),
        ("n", "there is no folder"),
        ("s3://bucket/m", "sign the files here, then upload them"),
    ],
)
def test_what_is_not_there_is_said(signed: SignedStore, text: str, words: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        versions_of(text if ":/" in text else f"{signed.folder}/{text}")
    assert words in str(caught.value)


def test_a_version_folder_names_its_version(signed: SignedStore) -> None:
    assert versions_of(str(signed.folder / "m" / "2")) == (signed.folder / "m", [2])


def test_verify_and_inspect_say_who_signed(tmp_path: Path) -> None:
    version = convert(tmp_path)
    key, public = make_key(tmp_path / "anna")
    assert json.loads(run("inspect", version, "--json").output)["signed"] == "no"
    assert isinstance(run("verify", version, "--trusted-keys", public).exception, RepositoryError)
    run("sign", version, "--key", tmp_path / "anna")
    assert f"signed: by {key.key_id[:16]}\n" in run("verify", version).output
    assert f"signed: by anna ({key.key_id[:16]})\n" in run("verify", version, "--trusted-keys", public).output
    (version.parent / "config.pbtxt").write_text("max_batch_size: 2\n")
    said = json.loads(run("inspect", version, "--json").output)["signed"]
    assert said.startswith("not these files: ")
    assert "config.pbtxt" in said
    assert isinstance(run("verify", version).exception, RepositoryError)


def test_signatures_that_no_longer_hold(signed: SignedStore, tmp_path: Path) -> None:
    version = signed.add(3, "one") / "3"
    assert check_signers(version, None) == f"by {signed.key.key_id[:16]}"
    attestation = Attestation.read(version)
    assert attestation
    Attestation(attestation.payload, {signed.key.key_id: bytes(64)}).write(version)
    with pytest.raises(RepositoryError, match="its signature is not valid"):
        check_signers(version, None)
    unsigned = signed.folder / "m" / "1"
    assert check_signers(unsigned, None) == NOT_SIGNED
    with pytest.raises(RepositoryError, match="it is not signed"):
        check_signers(unsigned, tmp_path / "release.pub")
