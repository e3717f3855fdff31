"""Models in remote stores: fetch, pull and push."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import pytest
from oci_server import OciServer, needs_registry

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import remote_model as module
from graphkiln_backend.repository.remote_model import Pulled, fetch_model, fetch_path, list_store, push_store
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles
from graphkiln_backend.storage.oci import MANIFEST_TYPE, digest_of


@pytest.fixture
def store(s3_server: str, bucket: Any) -> str:
    for key in ("digits/1/model.onnx", "digits/2/model.onnx", "digits/10/model.onnx", "digits/config.pbtxt", "x/1/a"):
        bucket.put_object(Key=f"store/{key}", Body=key.encode())
    return f"s3://{s3_server}/models/store"


def fetch(text: str, folder: Path) -> tuple[str, list[str]]:
    address = RemoteAddress.parse(text)
    assert address
    found = fetch_model(address, folder)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return str(found.relative_to(folder)), files


def test_the_newest_version(store: str, tmp_path: Path) -> None:
    assert fetch(f"{store}/digits", tmp_path) == ("digits", ["digits/10/model.onnx", "digits/config.pbtxt"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "there is no model at .*/nosuch"),
        ("nosuch/3", "there is no model at .*/nosuch/3"),
        ("digits/3", r"model 'digits' has no such version \(existing versions: 1, 2, 10\)"),
    ],
)
def test_missing_model_or_version(store: str, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RemoteStoreError, match=message):
        fetch(f"{store}/{name}", tmp_path)


def fetch_any(text: str, folder: Path) -> str:
    address = RemoteAddress.parse(text)
    assert address
    return str(fetch_path(address, folder).relative_to(folder))


def test_paths_of_models_versions_and_graphs(
    store: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "external_files", lambda _: ["m.data", "deep/w", "../x", "/etc/passwd"])
    for key in ("m.onnx", "m.data", "deep/w"):
        bucket.put_object(Key=f"store/{key}", Body=b"x")
    assert fetch_any(f"{store}/digits", tmp_path / "a") == "digits"
    assert fetch_any(f"{store}/digits/2/model.onnx", tmp_path / "b") == "digits/2"
    (tmp_path / "c").mkdir()
    assert fetch_any(f"{store}/m.onnx", tmp_path / "c") == "m.onnx"
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "c")) for path in files) == ["deep/w", "m.data", "m.onnx"]
    assert not (tmp_path / "x").exists()


def test_graph_in_openvino_ir_comes_with_its_weights(store: str, bucket: Any, tmp_path: Path) -> None:
    for key in ("net.xml", "net.bin", "other/1/model.xml", "other/1/model.bin"):
        bucket.put_object(Key=f"store/{key}", Body=b"x")
    assert fetch_any(f"{store}/net.xml", tmp_path) == "net.xml"
    assert (tmp_path / "net.bin").is_file()
    assert fetch_any(f"{store}/other/1/model.xml", tmp_path) == "other/1"


# Pulling models into a store: versions appear whole, what is there stays, and something else is refused.

ADDRESS = "oci://h/r:1"
Contents = dict[str, bytes]


class FakeRegistry:
    """Files by their paths in one artifact; remembers which were fetched."""

    def __init__(self) -> None:
        self.contents: Contents = {}
        self.fetched: list[str] = []

    def open(self, address: RemoteAddress) -> RemoteFiles:
        registry, prefix = self, f"{address.text}/".removeprefix(f"{ADDRESS}/")

        class Files(RemoteFiles):
            def list(self) -> dict[str, RemoteFile]:
                return {
                    path.removeprefix(prefix): RemoteFile(digest_of(content), len(content))
                    for path, content in registry.contents.items()
                    if path.startswith(prefix)
                }

            def fetch(self, path: str, target: Path) -> None:
                registry.fetched.append(f"{prefix}{path}")
                target.write_bytes(registry.contents[f"{prefix}{path}"])

        return Files(address)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    fake = FakeRegistry()
    fake.contents = {"m/config.pbtxt": b"c", "m/1/model.onnx": b"one", "n/1/model.onnx": b"other", "README.md": b"r"}
    monkeypatch.setattr(module, "RemoteFiles", fake.open)
    return fake


Pull = Callable[..., Pulled]


@pytest.fixture
def pull(tmp_path: Path) -> Pull:
    def run(text: str = ADDRESS) -> Pulled:
        address = RemoteAddress.parse(text)
        assert address
        listed, store = list_store(address), tmp_path / "store"
        store.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=tmp_path) as folder:
            return listed.fetch(store, Path(folder)).place()

    return run


def there(folder: Path) -> Contents:
    """Every file of a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pull_all_models(registry: FakeRegistry, pull: Pull, tmp_path: Path) -> None:
    assert pull() == Pulled(models=("m", "n"), files=3, size_bytes=9)
    del registry.contents["README.md"]
    assert there(tmp_path / "store") == registry.contents


def test_existing_files_are_not_fetched(registry: FakeRegistry, pull: Pull) -> None:
    pull()
    registry.fetched.clear()
    assert pull() == Pulled(models=("m", "n"), files=0, size_bytes=0)
    registry.contents["m/2/model.onnx"] = b"two"
    assert pull().files == 1
    assert registry.fetched == ["m/2/model.onnx"]


def test_new_version_is_added(registry: FakeRegistry, pull: Pull, tmp_path: Path) -> None:
    pull()
    del registry.contents["m/1/model.onnx"]
    registry.contents |= {"m/2/model.onnx": b"two", "m/labels.txt": b"a"}
    pull()
    found = there(tmp_path / "store" / "m")
    assert found == {"config.pbtxt": b"c", "labels.txt": b"a", "1/model.onnx": b"one", "2/model.onnx": b"two"}


@pytest.mark.parametrize(
    ("path", "content"),
    [("m/1/model.onnx", b"two"), ("m/config.pbtxt", b"d"), ("m/1/weights.bin", b"w"), ("m/1/a/weights.bin", b"w")],
)
def test_differing_file_is_refused(
    registry: FakeRegistry, pull: Pull, tmp_path: Path, path: str, content: bytes
) -> None:
    pull()
    before = there(tmp_path / "store")
    registry.contents |= {path: content, "m/2/model.onnx": b"two"}
    with pytest.raises(RepositoryError, match=rf"store/{path} differs from the pulled file; nothing was changed"):
        pull()
    assert there(tmp_path / "store") == before


@pytest.mark.usefixtures("registry")
def test_additional_local_file_is_refused(pull: Pull, tmp_path: Path) -> None:
    pull()
    (tmp_path / "store" / "m" / "1" / "more.bin").touch()
    with pytest.raises(RepositoryError, match=r"store/m/1/more\.bin differs"):
        pull()


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("text", [f"{ADDRESS}/x", f"{ADDRESS}/m/1"])
def test_address_without_model(pull: Pull, tmp_path: Path, text: str) -> None:
    with pytest.raises(RemoteStoreError, match="there is no model at"):
        pull(text)
    assert not (tmp_path / "store").exists()


# Pushing a model store to a real registry: the same files are the same artifact, and what is no store is refused.


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


@pytest.fixture(scope="module")
def oci_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    with OciServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def local_store(tmp_path: Path) -> Path:
    for model, content in (("a", b"one"), ("b", b"one")):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.onnx").write_bytes(content)
    return tmp_path


@needs_registry
def test_pushed_manifest(oci_registry: OciServer, local_store: Path) -> None:
    pushed = push_store(local_store, address(f"oci://{oci_registry.host}/models:1"))
    assert (pushed.files, pushed.size_bytes) == (2, 6)
    asked = Request(f"http://{oci_registry.host}/v2/models/manifests/1", headers={"Accept": MANIFEST_TYPE})
    with urlopen(asked) as answer:
        content = answer.read()
        assert answer.headers["Docker-Content-Digest"] == pushed.digest == digest_of(content)
    manifest = json.loads(content)
    assert manifest["artifactType"] == "application/vnd.graphkiln.model-store.v1"
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in manifest["layers"]]
    assert titles == ["a/1/model.onnx", "b/1/model.onnx"]
    assert {layer["digest"] for layer in manifest["layers"]} == {digest_of(b"one")}


@needs_registry
def test_equal_files_give_an_equal_digest(oci_registry: OciServer, local_store: Path) -> None:
    first = push_store(local_store, address(f"oci://{oci_registry.host}/models:first"))
    (local_store / "a" / "1" / "model.onnx").touch()
    assert push_store(local_store, address(f"oci://{oci_registry.host}/other:second")) == first
    (local_store / "a" / "1" / "model.onnx").write_bytes(b"two")
    assert push_store(local_store, address(f"oci://{oci_registry.host}/models:first")).digest != first.digest


@pytest.mark.parametrize("text", ["s3://bucket/models", f"oci://h/r@sha256:{'0' * 64}", "oci://h/r:1/model"])
def test_push_to_another_address_is_refused(local_store: Path, text: str) -> None:
    with pytest.raises(RepositoryError, match="is not the tag of an artifact"):
        push_store(local_store, address(text))


def test_faulty_model_is_not_pushed(local_store: Path) -> None:
    (local_store / "a" / "1" / "pipe").symlink_to("/dev/null")
    with pytest.raises(RepositoryError, match=r"cannot push a: .*neither a file nor a folder"):
        push_store(local_store, address("oci://127.0.0.1:1/r:1"))


def test_unreachable_registry(local_store: Path) -> None:
    with pytest.raises(RepositoryError, match="cannot be reached"):
        push_store(local_store, address("oci://127.0.0.1:1/r:1"))
