"""Real servers for the tests of remote stores: S3, and a registry of OCI artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from object_store import ObjectStore
    from oci_server import OciServer


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    from object_store import ObjectStore  # heavy, and needed by few

    with ObjectStore() as server:
        yield server


@pytest.fixture
def s3_server(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """`HOST:PORT` of a server; its credentials are in the environment."""
    from object_store import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return object_store.address


@pytest.fixture
def bucket(object_store: ObjectStore) -> Iterator[object]:
    """An empty bucket `models`."""
    found = object_store.bucket("models")
    yield found
    found.objects.all().delete()
    found.delete()


@pytest.fixture(scope="module")
def oci_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    from oci_server import OciServer  # needed by few

    with OciServer(tmp_path_factory.mktemp("registry")) as server:
        yield server
