"""`graphkiln push` and `pull` with a real registry, with faults, and with signatures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import RunVerb
from faulty_registry import FaultyRegistry
from oci_server import OciServer, needs_registry
from signed import SignedStore

from graphkiln_backend.storage.address import RemoteAddress
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.system.owned_folder import OwnedFolder

PULL = """
import sys
from graphkiln.cli.main import main
sys.argv = ["graphkiln", "pull", *sys.argv[1:]]
main()
"""


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    store = SignedStore.make(tmp_path)
    store.add(1, "one")
    return store


@needs_registry
def test_pull_restores_what_was_pushed(
    run: RunVerb, oci_registry: OciServer, signed: SignedStore, tmp_path: Path
) -> None:
    address = f"oci://{oci_registry.host}/models:1"
    assert run("push", signed.folder, address).code == 0
    pulled = run("pull", address, tmp_path / "pulled", "--trusted-keys", tmp_path / "release.pub")
    assert (pulled.code, pulled.out) == (0, f"{tmp_path / 'pulled'}: 3 new files, 0.0 MB (m of {address})\n"), pulled
    for path in signed.folder.rglob("*"):
        copy = tmp_path / "pulled" / path.relative_to(signed.folder)
        assert copy.is_dir() if path.is_dir() else copy.read_bytes() == path.read_bytes()
    again = run("pull", f"{address}/m", tmp_path / "pulled")
    assert again.out == f"{tmp_path / 'pulled'}: nothing is new (m of {address}/m)\n"


@needs_registry
def test_unsigned_versions_are_not_pulled(
    run: RunVerb, oci_registry: OciServer, signed: SignedStore, tmp_path: Path
) -> None:
    signed.add(2, "two", signed=False)
    address = f"oci://{oci_registry.host}/models:2"
    assert run("push", signed.folder, address).code == 0
    refused = run("pull", address, tmp_path / "pulled", "--trusted-keys", tmp_path / "release.pub")
    assert refused.code == 2
    assert "m version 2 is not pulled: it is not signed" in refused.err
    assert list((tmp_path / "pulled").iterdir()) == []


@needs_registry
def test_one_model_of_a_store(run: RunVerb, oci_registry: OciServer, tmp_path: Path) -> None:
    for model in ("a", "b"):
        (tmp_path / "store" / model / "1").mkdir(parents=True)
        (tmp_path / "store" / model / "1" / "model.onnx").write_bytes(b"one")
    text = f"oci://{oci_registry.host}/one:1"
    done = run("push", tmp_path / "store" / "a", text)
    assert done.code == 0, done
    assert f"{text}: 1 files, 0.0 MB, sha256:" in done.out
    address = RemoteAddress.parse(text)
    assert address
    assert list(RemoteFiles(address).list()) == ["a/1/model.onnx"]


@pytest.mark.parametrize(
    ("fault", "words"), [("missing", "the registry has lost"), ("altered", "sent other bytes"), ("broken", "500")]
)
def test_failed_fetch_leaves_nothing(run: RunVerb, tmp_path: Path, fault: str, words: str) -> None:
    with FaultyRegistry({"m/1/model.onnx": b"content"}) as registry:
        registry.fault = fault
        done = run("pull", registry.address, tmp_path / "store")
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert len(done.err.splitlines()) == 1
    assert list((tmp_path / "store").iterdir()) == []


def test_store_on_a_read_only_volume(run: RunVerb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(30, "Read-only file system", str(tmp_path / ".pull-x"))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with FaultyRegistry({"m/1/model.onnx": b"content"}) as registry:
        done = run("pull", registry.address, tmp_path)
    assert (done.code, done.err) == (
        2,
        f"graphkiln: {tmp_path} cannot be written: Read-only file system (pull into another folder)\n",
    )


def test_only_folders_of_dead_pulls_are_removed(run: RunVerb, tmp_path: Path) -> None:
    dead, living = OwnedFolder(tmp_path, ".pull-"), OwnedFolder(tmp_path, ".pull-")
    os.close(dead._lock)  # as the kernel does for a process that dies
    dead._lock = -1
    with living, FaultyRegistry({"m/1/model.onnx": b"content"}) as registry:
        assert run("pull", registry.address, tmp_path).code == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == [living.path.name, "m"]


@pytest.mark.slow
def test_next_pull_removes_what_a_killed_one_left(run: RunVerb, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with FaultyRegistry({"m/1/model.onnx": b"content"}) as registry:
        registry.fault = "hang half way"
        command = [sys.executable, "-c", PULL, registry.address, str(store)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
            assert registry.hanging.wait(60)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        (left,) = store.glob(".pull-*")
        registry.fault = ""
        assert list(left.iterdir())
        assert run("pull", registry.address, store).code == 0
    assert [path.name for path in store.iterdir()] == ["m"]
    assert (store / "m" / "1" / "model.onnx").read_bytes() == b"content"
