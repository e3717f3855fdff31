"""`graphkiln push`: a store, or one model of it, into a real registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import RunVerb
from oci_server import OciServer, needs_registry

from graphkiln_backend.storage.address import RemoteAddress
from graphkiln_backend.storage.files import RemoteFiles


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[OciServer]:
    with OciServer(tmp_path / "registry") as server:
        yield server


@needs_registry
def test_one_model_of_a_store(run: RunVerb, registry: OciServer, tmp_path: Path) -> None:
    for model in ("a", "b"):
        (tmp_path / "store" / model / "1").mkdir(parents=True)
        (tmp_path / "store" / model / "1" / "model.onnx").write_bytes(b"one")
    text = f"oci://{registry.host}/models:1"
    done = run("push", tmp_path / "store" / "a", text)
    assert done.code == 0, done
    assert f"{text}: 1 files, 0.0 MB, sha256:" in done.out
    address = RemoteAddress.parse(text)
    assert address
    assert list(RemoteFiles(address).list()) == ["a/1/model.onnx"]


def test_a_folder_is_no_address(run: RunVerb, tmp_path: Path) -> None:
    done = run("push", tmp_path, tmp_path / "copy")
    assert done.code == 2
    assert "is no address" in done.err
