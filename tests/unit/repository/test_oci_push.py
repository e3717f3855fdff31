"""Pushing a model store to a real registry: the same files are the same artifact, and what is no store is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from oci_server import OciServer, needs_registry

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.oci_push import push_store
from graphkiln_backend.repository.oci_registry import MANIFEST_TYPE, digest_of
from graphkiln_backend.repository.remote_address import RemoteAddress


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    with OciServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for model, content in (("a", b"one"), ("b", b"one")):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.onnx").write_bytes(content)
    return tmp_path


@needs_registry
def test_the_registry_holds_an_oci_manifest_of_the_files(registry: OciServer, store: Path) -> None:
    pushed = push_store(store, address(f"oci://{registry.host}/models:1"))
    assert (pushed.files, pushed.size_bytes) == (2, 6)
    asked = Request(f"http://{registry.host}/v2/models/manifests/1", headers={"Accept": MANIFEST_TYPE})
    with urlopen(asked) as answer:
        content = answer.read()
        assert answer.headers["Docker-Content-Digest"] == pushed.digest == digest_of(content)
    manifest = json.loads(content)
    assert manifest["artifactType"] == "application/vnd.graphkiln.model-store.v1"
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in manifest["layers"]]
    assert titles == ["a/1/model.onnx", "b/1/model.onnx"]
    assert {layer["digest"] for layer in manifest["layers"]} == {digest_of(b"one")}


@needs_registry
def test_the_same_files_are_the_same_artifact(registry: OciServer, store: Path) -> None:
    first = push_store(store, address(f"oci://{registry.host}/models:first"))
    (store / "a" / "1" / "model.onnx").touch()
    assert push_store(store, address(f"oci://{registry.host}/other:second")) == first
    (store / "a" / "1" / "model.onnx").write_bytes(b"two")
    assert push_store(store, address(f"oci://{registry.host}/models:first")).digest != first.digest


@pytest.mark.parametrize("text", ["s3://bucket/models", f"oci://h/r@sha256:{'0' * 64}", "oci://h/r:1/model"])
def test_another_address_is_refused(store: Path, text: str) -> None:
    with pytest.raises(RepositoryError, match="is no artifact's tag"):
        push_store(store, address(text))


def test_a_store_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="holds no model"):
        push_store(tmp_path, address("oci://h/r:1"))


def test_a_model_with_a_fault_is_refused_before_anything_is_sent(store: Path) -> None:
    (store / "a" / "1" / "pipe").symlink_to("/dev/null")
    with pytest.raises(RepositoryError, match=r"a is not pushed: .*neither a file nor a folder"):
        push_store(store, address("oci://127.0.0.1:1/r:1"))


def test_a_registry_that_is_not_there(store: Path) -> None:
    with pytest.raises(RepositoryError, match="cannot be reached"):
        push_store(store, address("oci://127.0.0.1:1/r:1"))
