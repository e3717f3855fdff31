"""`graphkiln sign` and `keygen`, and the signers that `verify` and `inspect` print."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import zoo
from commands import RunVerb
from signed import Authority, SignedStore, make_key
from tiny import convert

from graphkiln_backend.repository.signing import SIGNATURE_FILE, find_signer, is_signed
from graphkiln_backend.repository.signing_keys import TrustedKeys


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    store = SignedStore.make(tmp_path)
    for version in (1, 2):
        store.add(version, "text", signed=False)
    return store


def signers(model: Path, version: int) -> list[str]:
    return [find_signer(model, version, None).signer] if is_signed(model, version) else []


def test_one_version_or_all(run: RunVerb, signed: SignedStore, tmp_path: Path) -> None:
    model = signed.folder / "m"
    for path in (f"{model}:2", model / "2"):
        finished = run("sign", path, "--key", tmp_path / "release")
        assert finished.out == f"m version 2: 2 files signed by {signed.key.key_id[:16]}\n"
        assert (signers(model, 1), signers(model, 2)) == ([], [f"by {signed.key.key_id[:16]}, not checked"])
    run("sign", model, "--key", tmp_path / "release")
    assert signers(model, 1) == signers(model, 2)


def test_a_key_with_a_passphrase(run: RunVerb, signed: SignedStore, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("correct horse\n")
    made = run("keygen", tmp_path / "k", "--passphrase-file", tmp_path / "words")
    assert made.code == 0, made.err
    assert "k.pub is trusted" in made.out.replace("\n", "")
    assert run("sign", signed.folder / "m", "--key", tmp_path / "k").code == 2
    opened = run("sign", signed.folder / "m", "--key", tmp_path / "k", "--passphrase-file", tmp_path / "words")
    assert opened.code == 0, opened.err
    (tmp_path / "words").write_text("\n")
    refused = run("sign", signed.folder / "m", "--key", tmp_path / "k", "--passphrase-file", tmp_path / "words")
    assert (refused.code, "is empty" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("m:3", "m has no version 3 (it has 1, 2)"),
        ("n", "there is no file or folder"),
        ("s3://bucket/m", "sign the files here, then upload them"),
    ],
)
def test_missing_versions(run: RunVerb, signed: SignedStore, tmp_path: Path, path: str, message: str) -> None:
    finished = run("sign", path if ":/" in path else f"{signed.folder}/{path}", "--key", tmp_path / "release")
    assert (finished.code, message in finished.err) == (2, True), finished.err


def test_verify_and_inspect_name_the_signers(run: RunVerb, tmp_path: Path) -> None:
    version = convert(tmp_path)
    key, public = make_key(tmp_path / "anna")
    assert json.loads(run("inspect", version, "--json").out)["signed"] == "no"
    refused = run("verify", version, "--trusted-keys", public)
    assert (refused.code, "it is not signed" in refused.err) == (2, True)
    run("sign", version, "--key", tmp_path / "anna")
    assert f"signed: by {key.key_id[:16]}, not checked\n" in run("verify", version).out
    for option in ("--trusted-keys", "--signed-by"):
        assert f"signed: by anna ({key.key_id[:16]})\n" in run("verify", version, option, public).out
    (version.parent / "config.pbtxt").write_text("max_batch_size: 2\n")
    changed = json.loads(run("inspect", version, "--json").out)["signed"]
    assert changed.startswith("not these files: ")
    assert "config.pbtxt" in changed
    assert run("verify", version).code == 2
    bundle = (version / SIGNATURE_FILE).read_text()
    (version / SIGNATURE_FILE).write_text(bundle[:-9])
    refused = run("verify", version)
    assert (refused.code, "model.sig is damaged" in refused.err) == (2, True)


def test_sign_with_a_certificate(run: RunVerb, signed: SignedStore, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    key = authority.certify("ann")
    done = run("sign", signed.folder / "m", "--key", key.file, "--certificate", key.certificate)
    assert done.code == 0, done.err
    assert f"m version 1: 2 files signed by {key.key_id[:16]} with ann.crt\n" in done.out
    assert find_signer(signed.folder / "m", 1, TrustedKeys.read(authority.trusted)).signer.startswith("by CN=ann")
    wrong = run("sign", signed.folder / "m", "--key", tmp_path / "release", "--certificate", key.certificate)
    assert (wrong.code, "does not match" in wrong.err) == (2, True)


def test_convert_signs(run: RunVerb, tmp_path: Path) -> None:
    onnx.save(zoo.scale(("batch", 3), 2), tmp_path / "scale.onnx")
    _, public = make_key(tmp_path / "release")
    command = ("convert", tmp_path / "scale.onnx", "--model-store", tmp_path / "store", "--name", "scale")
    refused = run(*command, "--sign", public)
    assert (refused.code, (tmp_path / "store").exists()) == (2, False), refused
    done = run(*command, "--sign", tmp_path / "release")
    assert done.code == 0, done.err
    assert "signed by " in done.out
    assert run("verify", tmp_path / "store" / "scale", "--signed-by", public).code == 0
