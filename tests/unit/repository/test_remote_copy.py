"""The local copy of a remote store: what is fetched, and when it appears."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln_backend.repository import remote_copy as module
from graphkiln_backend.repository.remote_copy import RemoteCopy
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles

DIGITS = Path(__file__).parents[3] / "model_repository" / "digits" / "1"


class FakeFiles(RemoteFiles):
    """Files in a dictionary; `on_fetch` is called with each path."""

    def __init__(self) -> None:
        address = RemoteAddress.parse("s3://bucket/store")
        assert address
        super().__init__(address)
        self.contents: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.error: Exception | None = None
        self.on_fetch: Callable[[str], None] = lambda _: None

    def list(self) -> dict[str, RemoteFile]:
        if self.error:
            raise self.error
        return {path: RemoteFile(str(hash(body)), len(body)) for path, body in self.contents.items()}

    def fetch(self, path: str, target: Path) -> None:
        self.fetched.append(path)
        self.on_fetch(path)
        target.write_bytes(self.contents[path])


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FakeFiles:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    return FakeFiles()


@pytest.fixture
def copy(files: FakeFiles, tmp_path: Path) -> RemoteCopy:
    return RemoteCopy(files, tmp_path / "copy")


def follow(copy: RemoteCopy, *, settled: bool = False) -> list[str]:
    """Fetches and takes over; returns what is there then."""
    copy.take_over(copy.fetch(settled=settled))
    return sorted(str(path.relative_to(copy.store)) for path in copy.store.rglob("*") if path.is_file())


def test_new_version_needs_two_equal_listings(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x"}
    follow(copy, settled=True)
    files.contents |= {"a/2/model.onnx": b"y"}
    assert follow(copy) == ["a/1/model.onnx"]
    files.contents |= {"a/2/model.data": b"z"}  # the upload goes on
    assert follow(copy) == ["a/1/model.onnx"]
    assert follow(copy) == ["a/1/model.onnx", "a/2/model.data", "a/2/model.onnx"]


def test_version_changed_during_the_fetch_waits(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x"}

    def change(_: str) -> None:
        files.contents["a/1/more"] = b"y"
        files.on_fetch = lambda _: None

    files.on_fetch = change
    changes = copy.fetch(settled=True)
    assert changes.waiting == {("a", "1")}
    copy.take_over(changes)
    assert list(copy.store.iterdir()) == []


def test_only_changed_files_are_fetched(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x", "a/1/weights": b"large", "b/1/model.onnx": b"b"}
    follow(copy, settled=True)
    files.fetched.clear()
    files.contents["a/1/model.onnx"] = b"y"
    follow(copy)
    follow(copy)
    assert files.fetched == ["a/1/model.onnx"]
    assert (copy.store / "a/1/model.onnx").read_bytes() == b"y"
    assert (copy.store / "a/1/weights").read_bytes() == b"large"


@pytest.mark.parametrize("gone", ["a/2/", "a/config", "a/"])
def test_removed_files_disappear(files: FakeFiles, copy: RemoteCopy, gone: str) -> None:
    files.contents = {"a/1/model.onnx": b"x", "a/2/model.onnx": b"y", "a/config.pbtxt": b"c", "b/1/model.onnx": b"b"}
    follow(copy, settled=True)
    files.contents = {path: body for path, body in files.contents.items() if not path.startswith(gone)}
    assert follow(copy) == sorted(files.contents)
    assert (copy.store / "a").exists() == (gone != "a/")


def test_failed_listing_removes_nothing(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x"}
    follow(copy, settled=True)
    files.error = RemoteStoreError("no network", passing=True)
    with pytest.raises(RemoteStoreError):
        copy.fetch()
    assert (copy.store / "a/1/model.onnx").exists()
    files.error = None
    assert follow(copy) == ["a/1/model.onnx"]


def test_incomplete_version_waits(files: FakeFiles, copy: RemoteCopy) -> None:
    whole = {f"digits/1/{path.name}": path.read_bytes() for path in DIGITS.iterdir()}
    files.contents = {path: body for path, body in whole.items() if not path.endswith("golden.npz")}
    assert follow(copy, settled=True) == []
    assert follow(copy) == []
    files.contents = whole
    follow(copy)
    assert follow(copy) == sorted(whole)


def test_fetched_files_survive_a_network_failure(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x", "a/1/weights": b"large"}

    def fail(path: str) -> None:
        if path == "a/1/weights":
            raise RemoteStoreError("no network", passing=True)

    files.on_fetch = fail
    for _ in range(3):
        with pytest.raises(RemoteStoreError):
            copy.fetch(settled=True)
    assert len(list((copy.folder / "staging").iterdir())) == 1
    assert sorted(files.fetched) == ["a/1/model.onnx", *["a/1/weights"] * 3]
    files.on_fetch = lambda _: None
    assert follow(copy, settled=True) == ["a/1/model.onnx", "a/1/weights"]
    assert files.fetched.count("a/1/model.onnx") == 1


def test_full_disk_keeps_nothing(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x", "a/1/weights": b"large"}

    def fail(path: str) -> None:
        if path == "a/1/weights":
            raise OSError(28, "No space left on device")

    files.on_fetch = fail
    with pytest.raises(OSError, match="No space left"):
        copy.fetch(settled=True)
    assert list((copy.folder / "staging").iterdir()) == []
    files.on_fetch = lambda _: None
    assert follow(copy, settled=True) == ["a/1/model.onnx", "a/1/weights"]


def test_short_file_is_refused(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"whole"}

    def cut(path: str) -> None:
        files.contents[path] = b"who"

    files.on_fetch = cut
    with pytest.raises(RemoteStoreError, match="got 3 bytes, expected 5"):
        copy.fetch(settled=True)


def test_too_little_disk_space(files: FakeFiles, copy: RemoteCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    files.contents = {"a/1/model.onnx": b"whole"}
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=4))
    with pytest.raises(RemoteStoreError, match="do not fit"):
        copy.fetch(settled=True)


def test_replaced_version_keeps_no_old_files(files: FakeFiles, copy: RemoteCopy) -> None:
    files.contents = {"a/1/model.onnx": b"x", "a/1/old": b"o"}
    follow(copy, settled=True)
    files.contents = {"a/1/model.onnx": b"y"}
    follow(copy)
    assert follow(copy) == ["a/1/model.onnx"]
    assert not list((copy.folder / "staging").iterdir())


def test_stopped_copy_is_continued(
    files: FakeFiles, copy: RemoteCopy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.contents = {"a/1/model.onnx": bytes(3_000_000), "a/1/weights.bin": bytes(5_000_000)}

    def stop_half_way(wanted: dict[str, RemoteFile], folder: Path, whole: Callable[[str], object]) -> None:
        (folder / "a" / "1").mkdir(parents=True)
        for path, size in zip(sorted(wanted), (3_000_000, 1_000_000), strict=True):
            (folder / path).write_bytes(files.contents[path][:size])
        whole(min(wanted))
        raise SystemExit(0)

    with monkeypatch.context() as patched:
        patched.setattr(files, "fetch_all", stop_half_way)
        with pytest.raises(SystemExit):
            copy.fetch(settled=True)
    assert "s3://bucket/store: 4.0 of 8.0 MB copied in 0 s" in caplog.text
    follow(RemoteCopy(files, copy.folder), settled=True)
    assert files.fetched == ["a/1/weights.bin"]
    assert {path: (copy.store / path).read_bytes() for path in files.contents} == files.contents
    assert list((copy.folder / "staging").iterdir()) == []
