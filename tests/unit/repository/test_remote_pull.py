"""Pulling models into a store: versions appear whole, what is there stays, and something else is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import remote_pull as module
from graphkiln_backend.repository.oci_registry import digest_of
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_files import RemoteFile, RemoteFiles
from graphkiln_backend.repository.remote_pull import Pulled, list_store

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


def test_all_models_and_nothing_beside_them(registry: FakeRegistry, pull: Pull, tmp_path: Path) -> None:
    assert pull() == Pulled(models=("m", "n"), files=3, size_bytes=9)
    del registry.contents["README.md"]
    assert there(tmp_path / "store") == registry.contents


@pytest.mark.usefixtures("registry")
def test_one_model(pull: Pull, tmp_path: Path) -> None:
    assert pull(f"{ADDRESS}/m").models == ("m",)
    assert there(tmp_path / "store").keys() == {"m/config.pbtxt", "m/1/model.onnx"}


def test_what_is_there_does_not_travel_again(registry: FakeRegistry, pull: Pull) -> None:
    pull()
    registry.fetched.clear()
    assert pull() == Pulled(models=("m", "n"), files=0, size_bytes=0)
    registry.contents["m/2/model.onnx"] = b"two"
    assert pull().files == 1
    assert registry.fetched == ["m/2/model.onnx"]


def test_a_new_version_is_added_to_those_that_are_there(registry: FakeRegistry, pull: Pull, tmp_path: Path) -> None:
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
def test_something_else_is_refused_and_nothing_changes(
    registry: FakeRegistry, pull: Pull, tmp_path: Path, path: str, content: bytes
) -> None:
    pull()
    before = there(tmp_path / "store")
    registry.contents |= {path: content, "m/2/model.onnx": b"two"}
    with pytest.raises(RepositoryError, match=rf"store/{path} is not what was pulled; nothing was changed"):
        pull()
    assert there(tmp_path / "store") == before


@pytest.mark.usefixtures("registry")
def test_a_version_that_has_more_here_is_another_one(pull: Pull, tmp_path: Path) -> None:
    pull()
    (tmp_path / "store" / "m" / "1" / "more.bin").touch()
    with pytest.raises(RepositoryError, match=r"store/m/1/more\.bin is not what was pulled"):
        pull()


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("text", [f"{ADDRESS}/x", f"{ADDRESS}/m/1"])
def test_where_no_model_is(pull: Pull, tmp_path: Path, text: str) -> None:
    with pytest.raises(RemoteStoreError, match="there is no model at"):
        pull(text)
    assert not (tmp_path / "store").exists()
