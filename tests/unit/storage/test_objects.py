"""Objects of a bucket: paged listing and conditional reads, with an S3 server and a fake of Google's protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google_store import GoogleStore
from object_store import CREDENTIALS, ObjectStore

from graphkiln_backend.storage import objects as remote_objects
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.objects import ObjectChanged, RemoteObjects

KEYS = ("a/1.jpg", "a/2.jpg", "a/b/3.jpg", "b/4 ü.jpg")


@pytest.fixture(scope="module")
def _environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module", params=["s3", "gs"])
def objects(request: pytest.FixtureRequest, _environment: pytest.MonkeyPatch) -> Iterator[RemoteObjects]:
    if request.param == "gs":
        with GoogleStore() as google:
            for key in KEYS:
                google.put("bucket", key, key.encode())
            _environment.setenv("STORAGE_EMULATOR_HOST", google.address)
            yield RemoteObjects(_address("gs://bucket"))
            return
    with ObjectStore() as store:
        bucket = store.bucket("bucket")
        for key in KEYS:
            bucket.put_object(Key=key, Body=key.encode())
        yield RemoteObjects(_address(f"s3://{store.address}/bucket"))


def _address(text: str) -> RemoteAddress:
    address = RemoteAddress.parse(text)
    assert address
    return address


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 2, 1000])
def test_paged_listing(objects: RemoteObjects, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_objects, "_PAGE", page)
    found = list(objects.list("bucket/a/"))
    assert [one.path for one in found] == [f"bucket/{key}" for key in KEYS[:3]]
    assert [one.size for one in found] == [len(key) for key in KEYS[:3]]
    assert found == [objects.describe(one.path) for one in found]
    assert list(objects.list("bucket/c/")) == []


@pytest.mark.slow
def test_read(objects: RemoteObjects) -> None:
    for key in KEYS:
        found = objects.describe(f"bucket/{key}")
        assert found
        assert objects.read(found.path, 100, found.stamp) == objects.read(found.path, 100) == key.encode()
    assert objects.read("bucket/a/1.jpg", 100, part=(2, 3)) == b"1.j"


@pytest.mark.slow
def test_replaced_object_is_refused(objects: RemoteObjects) -> None:
    stamp = "0" * 32 if objects._address.scheme == "s3" else "12345"
    with pytest.raises(ObjectChanged, match="has been replaced"):
        objects.read("bucket/a/1.jpg", 100, stamp)
    with pytest.raises(ObjectChanged):
        objects.read("bucket/a/1.jpg", 100, stamp, (0, 1))


@pytest.mark.slow
def test_missing_objects(objects: RemoteObjects) -> None:
    assert objects.describe("bucket/none.jpg") is None
    with pytest.raises(FileNotFoundError):
        objects.read("bucket/none.jpg", 100)
    with pytest.raises(FileNotFoundError):
        objects.open("bucket/none.jpg")
    with pytest.raises(RemoteStoreError, match="no such bucket"):
        list(objects.list("nobucket/a/"))


@pytest.mark.slow
def test_open(objects: RemoteObjects) -> None:
    with objects.open("bucket/b/4 ü.jpg") as file:
        file.seek(2)
        assert file.read(1) == b"4"


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_store_that_comes_back() -> None:
    with ObjectStore() as store:
        store.bucket("bucket").put_object(Key="a", Body=b"1")
        objects = RemoteObjects(_address(f"s3://{store.address}/bucket"))
        assert objects.read("bucket/a", 100) == b"1"
        store.stop()
        with pytest.raises(RemoteStoreError, match="cannot be reached") as raised:
            objects.read("bucket/a", 100)
        assert raised.value.passing
        store.start()
        assert objects.read("bucket/a", 100) == b"1"
