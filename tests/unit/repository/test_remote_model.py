"""Models in remote stores: fetch, pull and push."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import remote_model as module
from graphkiln_backend.repository.remote_model import Pulled, fetch_model, fetch_path, list_store
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles
from graphkiln_backend.storage.oci import digest_of


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
