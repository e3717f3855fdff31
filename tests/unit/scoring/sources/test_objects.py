"""Objects of a bucket: listed in pages, read as they were listed; against a real S3 server, and Google's protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google_store import GoogleStore
from object_store import CREDENTIALS, ObjectStore

from graphkiln_backend.graph.files import UnusableFile
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.sources import objects as module
from graphkiln_backend.scoring.sources import storage
from graphkiln_backend.scoring.sources.objects import ObjectStorage
from graphkiln_backend.storage.address import RemoteAddress

pytestmark = pytest.mark.slow

KEYS = ("a/1.jpg", "a/2.jpg", "a/b/3.jpg", "b/4 ü.jpg")


@pytest.fixture(scope="module")
def _environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module", params=["s3", "gs"])
def objects(request: pytest.FixtureRequest, _environment: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    if request.param == "gs":
        with GoogleStore() as google:
            for key in KEYS:
                google.put("bucket", key, key.encode())
            _environment.setenv("STORAGE_EMULATOR_HOST", google.address)
            yield ObjectStorage(_address("gs://bucket"))
            return
    with ObjectStore() as store:
        bucket = store.bucket("bucket")
        for key in KEYS:
            bucket.put_object(Key=key, Body=key.encode())
        yield ObjectStorage(_address(f"s3://{store.address}/bucket"))


def _address(text: str) -> RemoteAddress:
    address = RemoteAddress.parse(text)
    assert address
    return address


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_objects_are_listed_in_order_for_any_page_size(
    objects: ObjectStorage, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", page)
    found = list(objects.walk("bucket/a"))
    assert [one.path for one in found] == ["1.jpg", "2.jpg", "b/3.jpg"]
    for one, key in zip(found, KEYS, strict=False):
        known = objects.find(f"bucket/{key}")
        assert known
        assert (one.size, one.stamp) == (known.size, known.stamp) == (len(key), one.stamp)
    assert list(objects.walk("bucket/c")) == []


def test_object_is_read_whole_and_in_part(objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        found = objects.find(f"bucket/{key}")
        assert found
        assert objects.read(found.path, found.stamp) == objects.read(found.path, None) == key.encode()
    assert objects.read("bucket/a/1.jpg", None, part=(2, 3)) == b"1.j"
    with objects.open("bucket/b/4 ü.jpg") as file:
        file.seek(2)
        assert file.read(1) == b"4"
    monkeypatch.setattr(storage, "IMAGE_LIMIT", 3)
    with pytest.raises(UnusableFile, match="maximum of 3 bytes"):
        objects.read("bucket/a/1.jpg", None)


def test_replaced_object_is_refused(objects: ObjectStorage) -> None:
    stamp = "0" * 32 if objects._address.scheme == "s3" else "12345"
    for part in (None, (0, 1)):
        with pytest.raises(InputChanged, match="has been replaced"):
            objects.read("bucket/a/1.jpg", stamp, part)


def test_missing_object(objects: ObjectStorage) -> None:
    assert objects.find("bucket/none.jpg") is None
    with pytest.raises(FileNotFoundError):
        objects.read("bucket/none.jpg", None)
    with pytest.raises(InputChanged, match="was deleted"):
        objects.read("bucket/none.jpg", "1")
    with pytest.raises(ScoringError, match="no such object"):
        objects.open("bucket/none.jpg")
    with pytest.raises(ScoringError, match="no such bucket"):
        list(objects.walk("nobucket/a"))
