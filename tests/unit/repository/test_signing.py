"""Signatures of versions: what they cover, what invalidates them, and `model_signing` beside ours."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from signed import Authority, SignedStore, make_key

from graphkiln_backend.graph.errors import GraphkilnError, ManifestError, RepositoryError
from graphkiln_backend.repository.signing import (
    SIGNATURE_FILE,
    check_files,
    find_signer,
    sign_version,
)
from graphkiln_backend.repository.signing_keys import TrustedKeys


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


def check(model: Path, trusted: TrustedKeys, version: int = 1) -> str:
    statement = find_signer(model, version, trusted)
    check_files(statement, model)
    return statement.signer


def edit(path: Path, change: Callable[[Any], None]) -> None:
    bundle = json.loads(path.read_text())
    change(bundle)
    path.write_text(json.dumps(bundle))


class TestTheirTool:
    """`model_signing` verifies what was signed here, and the reverse."""

    @staticmethod
    def call(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "model_signing", *map(str, command)], capture_output=True, text=True, check=False
        )

    def test_verifies_ours(self, signed: SignedStore, tmp_path: Path) -> None:
        model = signed.add(1, "one")
        signed.add(2, "two")
        (model / ".hidden").write_text("not part of it")
        (model / "1" / "weights.bin").symlink_to(tmp_path / "release")
        sign_version(model, 1, signed.key)
        command = ["verify", "key", model, "--signature", model / "1" / SIGNATURE_FILE, "--allow_symlinks"]
        command += ["--public_key", tmp_path / "release.pub"]
        assert self.call(*command).returncode == 0
        signed.add(3, "three")  # was not there to be named as ignored
        assert self.call(*command, "--ignore_unsigned_files").returncode == 0
        (model / "config.pbtxt").write_text("max_batch_size: 9\n")
        assert "Hash mismatch for 'config.pbtxt'" in self.call(*command).stderr

    @pytest.mark.parametrize("place", [f"1/{SIGNATURE_FILE}", SIGNATURE_FILE])
    def test_signs_for_us(self, signed: SignedStore, tmp_path: Path, place: str) -> None:
        """The files of one version, or of all."""
        model = signed.add(1, "one", signed=False)
        (model / ".hidden").write_text("signed by them, not served by us")
        signed.add(2, "two", signed=False)
        made = self.call("sign", "key", model, "--signature", model / place, "--private_key", tmp_path / "release")
        assert made.returncode == 0, made.stderr
        assert check(model, signed.trusted) == f"by release ({signed.key.key_id[:16]})"
        signed.add(3, "three", signed=False)
        (model / "2" / "model.onnx").write_text("of another version")
        assert check(model, signed.trusted)
        (model / "1" / "model.onnx").write_text("uno")
        with pytest.raises(RepositoryError, match=r"1/model\.onnx is not the file that was signed"):
            check(model, signed.trusted)

    @pytest.mark.wide
    def test_certificates(self, signed: SignedStore, tmp_path: Path) -> None:
        authority = Authority(tmp_path / "pki")
        key = authority.certify("release")
        model = signed.add(1, "one", key=key)
        place = model / "1" / SIGNATURE_FILE
        chain = ["--certificate_chain", authority.trusted]
        assert self.call("verify", "certificate", model, "--signature", place, *chain).returncode == 0
        options = ["--private_key", key.file, "--signing_certificate", key.certificate, *chain]
        made = self.call("sign", "certificate", model, "--signature", place, *options)
        assert made.returncode == 0, made.stderr
        assert check(model, TrustedKeys.read(authority.trusted)).startswith("by CN=release")


class TestFiles:
    """What a signature covers."""

    def test_files_of_one_version(self, signed: SignedStore) -> None:
        model = signed.add(1, "one", signed=False)
        signed.add(2, "two")
        for name in ("1/weights/w.bin", ".hidden", "lost+found/42", "1/__pycache__/x", "1/attestation.json"):
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(b"w")
        statement = sign_version(model, 1, signed.key)
        assert list(statement.files) == ["1/model.onnx", "1/weights/w.bin", "config.pbtxt"]
        assert not (model / "1" / "attestation.json").exists()

    @pytest.mark.parametrize("name", ["1/model.onnx", "config.pbtxt"])
    def test_altered_file_with_old_size_and_time(self, signed: SignedStore, name: str) -> None:
        model = signed.add(1, "one")
        status = (model / name).stat()
        (model / name).write_bytes((model / name).read_bytes()[:-1] + b"X")
        os.utime(model / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(RepositoryError, match=f"{name} is not the file that was signed"):
            check(model, signed.trusted)

    def test_added_and_missing_files(self, signed: SignedStore) -> None:
        model = signed.add(1, "one")
        (model / "1" / "more.bin").write_bytes(b"")
        (model / "labels.txt").write_text("cat\n")
        (model / "config.pbtxt").unlink()
        with pytest.raises(RepositoryError, match=r"config.pbtxt missing, 1/more.bin, labels.txt added"):
            check(model, signed.trusted)

    def test_another_version_or_model(self, signed: SignedStore) -> None:
        """Also where the files are the same, byte by byte."""
        model = signed.add(1, "one")
        signed.add(2, "one", signed=False)
        shutil.copy(model / "1" / SIGNATURE_FILE, model / "2")
        with pytest.raises(RepositoryError, match=r"2/model\.onnx added"):
            check(model, signed.trusted, 2)
        with pytest.raises(RepositoryError, match="it was signed as m "):
            check(model.rename(model.with_name("n")), signed.trusted)

    def test_links_are_signed_by_content(self, signed: SignedStore, tmp_path: Path) -> None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "w.bin").write_text("w")
        model = signed.add(1, "one", signed=False)
        (model / "1" / "weights").symlink_to(tmp_path / "weights")
        assert "1/weights/w.bin" in sign_version(model, 1, signed.key).files
        (tmp_path / "weights" / "w.bin").write_text("x")
        with pytest.raises(RepositoryError, match=r"1/weights/w\.bin is not the file that was signed"):
            check(model, signed.trusted)

    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("nowhere")])
    def test_no_regular_file(self, signed: SignedStore, make: Callable[[Path], None]) -> None:
        model = signed.add(1, "one")
        before = (model / "1" / SIGNATURE_FILE).read_bytes()
        (model / "1" / "model.onnx").unlink()
        make(model / "1" / "model.onnx")
        with pytest.raises(RepositoryError, match=r"a pipe|No such file"):
            check(model, signed.trusted)
        with pytest.raises(RepositoryError, match=r"cannot be signed: .*as file or directory"):
            sign_version(model, 1, signed.key)
        assert (model / "1" / SIGNATURE_FILE).read_bytes() == before
        assert not (model / "1" / f".{SIGNATURE_FILE}").exists()


class TestSigners:
    """Whose signature counts."""

    def test_one_trusted_key_is_enough(self, signed: SignedStore, tmp_path: Path) -> None:
        second, public = make_key(tmp_path / "second")
        model = signed.add(1, "one", key=second)
        with pytest.raises(RepositoryError, match=f"signed by {second.key_id[:16]}, which is not trusted"):
            check(model, signed.trusted)
        assert find_signer(model, 1, None).signer == f"by {second.key_id[:16]}, not checked"
        (tmp_path / "keys").mkdir()
        for file in (public, tmp_path / "release.pub"):
            shutil.copy(file, tmp_path / "keys")
        assert check(model, TrustedKeys.read(tmp_path / "keys")).startswith("by second")
        (tmp_path / "keys" / "second.pub").unlink()  # the key was lost
        with pytest.raises(RepositoryError, match="which is not trusted"):
            check(model, TrustedKeys.read(tmp_path / "keys"))
        (model / "1" / SIGNATURE_FILE).unlink()
        with pytest.raises(RepositoryError, match="it is not signed"):
            check(model, signed.trusted)

    @pytest.mark.parametrize("hint", ["of the trusted key", None])
    def test_forged_key_id(self, signed: SignedStore, tmp_path: Path, hint: str | None) -> None:
        stranger, _ = make_key(tmp_path / "stranger")
        model = signed.add(1, "one", key=stranger)
        forged = {"publicKey": {"hint": hint and signed.key.key_id}}
        edit(model / "1" / SIGNATURE_FILE, lambda bundle: bundle["verificationMaterial"].update(forged))
        with pytest.raises(RepositoryError, match="not valid"):
            check(model, signed.trusted)

    def test_field_with_two_names(self, signed: SignedStore) -> None:
        """The library reads `dsse_envelope`, too: a list of files must not come from beside what was signed."""
        model = signed.add(1, "one")
        (model / "1" / "model.onnx").write_text("evil")

        def forge(bundle: dict[str, Any]) -> None:
            envelope = bundle["dsse_envelope"] = dict(bundle["dsseEnvelope"])
            payload = json.loads(base64.b64decode(envelope["payload"]))
            payload["predicate"]["resources"][0]["digest"] = "4" * 64
            bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()

        edit(model / "1" / SIGNATURE_FILE, forge)
        with pytest.raises(RepositoryError, match="signature is not valid"):
            check(model, signed.trusted)

    def test_certificate_that_is_revoked_or_ended(self, signed: SignedStore, tmp_path: Path) -> None:
        authority = Authority(tmp_path / "pki")
        key = authority.certify("release")
        model = signed.add(1, "one", key=key)
        assert check(model, TrustedKeys.read(tmp_path / "pki")).startswith("by CN=release")
        authority.revoke(key)
        with pytest.raises(RepositoryError, match=r"the certificate CN=release.* is revoked"):
            check(model, TrustedKeys.read(tmp_path / "pki"))
        sign_version(model, 1, authority.certify("former", datetime(2026, 1, 2, tzinfo=UTC)))
        with pytest.raises(RepositoryError, match=r"the certificate CN=former.* to 2026-01-02"):
            check(model, TrustedKeys.read(tmp_path / "pki"))

    def test_certificate_of_a_stranger(self, signed: SignedStore, tmp_path: Path) -> None:
        model = signed.add(1, "one", key=Authority(tmp_path / "theirs").certify("release"))
        with pytest.raises(RepositoryError, match=r"by CN=release.*, which is not trusted"):
            check(model, signed.trusted)
        with pytest.raises(RepositoryError, match=r"not valid: .*issuer"):
            check(model, TrustedKeys.read(Authority(tmp_path / "ours").trusted))

    def test_sigstore(self, signed: SignedStore, tmp_path: Path) -> None:
        model = signed.add(1, "one")
        material = {"certificate": {"rawBytes": base64.b64encode(b"x").decode()}, "tlogEntries": []}
        edit(model / "1" / SIGNATURE_FILE, lambda bundle: bundle.update(verificationMaterial=material))
        with pytest.raises(RepositoryError, match="by Sigstore, which is not trusted"):
            check(model, signed.trusted)
        identity = {"identity": "ann@example.com", "issuer": "https://example.com", "trust_config": "trust.json"}
        (tmp_path / "trust.json").write_text("{}")
        (tmp_path / "ann.sigstore.json").write_text(json.dumps(identity))
        with pytest.raises(RepositoryError, match="its signature is not valid"):
            check(model, TrustedKeys.read(tmp_path / "ann.sigstore.json"))


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_truncated_signature(signed: SignedStore, cut: int) -> None:
    model = signed.add(1, "one")
    path = model / "1" / SIGNATURE_FILE
    path.write_text(path.read_text()[:cut])
    with pytest.raises(ManifestError, match=r"model.sig is damaged"):
        check(model, signed.trusted)


@pytest.mark.parametrize("content", ["{}", "[]", '{"dsseEnvelope": 1}', "[" * 100_000, "\0"])
def test_file_of_another_kind(signed: SignedStore, content: str) -> None:
    model = signed.add(1, "one")
    (model / "1" / SIGNATURE_FILE).write_text(content)
    with pytest.raises(ManifestError, match=r"model.sig is damaged"):
        check(model, signed.trusted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda payload: payload.update(predicateType="https://slsa.dev/provenance/v1"), "unsupported statement"),
        (lambda payload: payload["predicate"]["serialization"].update(method="shards"), "expected files by sha256"),
        (lambda payload: payload["predicate"].pop("resources"), "is damaged"),
        (lambda payload: payload["subject"].append({}), "is damaged"),
    ],
)
def test_statement_of_another_kind(signed: SignedStore, change: Callable[[Any], None], words: str) -> None:
    model = signed.add(1, "one")

    def alter(bundle: Any) -> None:
        payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        change(payload)
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()

    edit(model / "1" / SIGNATURE_FILE, alter)
    with pytest.raises(ManifestError, match=words):
        check(model, signed.trusted)


class TestOldKind:
    """`attestation.json`, as graphkiln signed before."""

    @pytest.fixture
    def model(self, signed: SignedStore) -> Path:
        signed.add_old()
        return signed.folder / "m"

    def test_accepted_and_named(self, model: Path, signed: SignedStore, tmp_path: Path) -> None:
        trusted = TrustedKeys.read(tmp_path / "old.pub")
        assert check(model, trusted) == "by old (a69e40c8196185f7), in graphkiln's old format: sign it again"
        assert find_signer(model, 1, None).signer.startswith("by a69e40c8196185f7, in graphkiln's old format")
        with pytest.raises(RepositoryError, match="by a69e40c8196185f7, which is not trusted"):
            check(model, signed.trusted)
        sign_version(model, 1, signed.key)
        assert check(model, signed.trusted) == f"by release ({signed.key.key_id[:16]})"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda old: old["signatures"][0].update(sig=base64.b64encode(bytes(64)).decode()), "not valid"),
            (lambda old: old["signatures"][0].update(keyid="7"), "not valid"),
            (lambda old: old.update(payloadType="text/plain"), "unsupported statement"),
            (lambda old: old.pop("payload"), "attestation.json is damaged"),
        ],
    )
    def test_damaged(self, model: Path, tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
        edit(model / "1" / "attestation.json", change)
        with pytest.raises(GraphkilnError, match=words):
            check(model, TrustedKeys.read(tmp_path / "old.pub"))

    def test_altered_file_and_name(self, model: Path, tmp_path: Path) -> None:
        trusted = TrustedKeys.read(tmp_path / "old.pub")
        (model / "1" / "model.onnx").write_text("uno")
        with pytest.raises(RepositoryError, match=r"1/model\.onnx is not the file that was signed"):
            check(model, trusted)
        (model / "1").rename(model / "2")
        with pytest.raises(RepositoryError, match="signed as m version 1"):
            check(model, trusted, 2)
