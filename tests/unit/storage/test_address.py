"""Addresses of remote stores, in Triton's notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.storage.address import RemoteAddress, is_remote, parse_store

DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "root", "options"),
    [
        ("s3://bucket/a/b/", "bucket/a/b", {}),
        ("s3://bucket", "bucket", {}),
        ("s3://localhost:9000/bucket/a", "bucket/a", {"endpoint_url": "http://localhost:9000"}),
        ("s3://http://minio:9000/bucket/a", "bucket/a", {"endpoint_url": "http://minio:9000"}),
        ("s3://https://minio.example.org:443/bucket", "bucket", {"endpoint_url": "https://minio.example.org:443"}),
        ("gs://bucket/models", "bucket/models", {}),
        ("as://account/container/models", "container/models", {"account_name": "account"}),
        ("as://account.blob.core.windows.net/container", "container", {"account_name": "account"}),
        ("hf://owner/repository@main/models", "owner/repository@main/models", {}),
        (
            "oci://ghcr.io/team/models:1",
            "ghcr.io/team/models:1",
            {"protocol": "https", "artifact": "ghcr.io/team/models:1"},
        ),
        ("oci://localhost:5000/m:1/a/", "localhost:5000/m:1/a", {"protocol": "http", "artifact": "localhost:5000/m:1"}),
        ("oci://http://registry:5000/m:1", "registry:5000/m:1", {"protocol": "http", "artifact": "registry:5000/m:1"}),
        (
            f"oci://ghcr.io/m:1@sha256:{DIGITS}",
            f"ghcr.io/m:1@sha256:{DIGITS}",
            {"protocol": "https", "artifact": f"ghcr.io/m:1@sha256:{DIGITS}"},
        ),
    ],
)
def test_addresses(text: str, root: str, options: dict[str, str]) -> None:
    address = RemoteAddress.parse(text)
    assert address
    assert (address.root, address.options, str(address)) == (root, options, text.rstrip("/"))
    assert is_remote(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "as://account",
        "hf://owner",
        "s3://key:secret@bucket/x",
        "s3://b/../x",
        "oci://ghcr.io/team/models",
        "oci://ftp://ghcr.io/models:1",
        "oci://ghcr.io/models@sha256:12",
        "oci://ann:secret@ghcr.io/models:1",
        "ftp://x/y",
    ],
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(RepositoryError, match="://") as raised:
        RemoteAddress.parse(text)
    assert any(word in raised.value.hint for word in ("BUCKET", "OWNER", "ACCOUNT", "HOST/REPOSITORY:TAG"))


def test_path() -> None:
    assert parse_store("models/x") == Path("models/x")
    assert not is_remote("C/x")


def test_split() -> None:
    address = RemoteAddress.parse("s3://localhost:9000/bucket/store/digits")
    assert address
    above, name = address.split()
    assert (str(above), above.root, name) == ("s3://localhost:9000/bucket/store", "bucket/store", "digits")
    store = RemoteAddress.parse("s3://bucket")
    assert store
    with pytest.raises(RepositoryError, match="whole store"):
        store.split()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("oci://ann:hunter2@ghcr.io/models:1", "hunter2"),
        ("s3://AKIAIOSFODNN7EXAMPLE:wJal/rXU+tnFEMI@localhost:9000/bucket/x", "wJal"),
        ("s3://https://ann:hunter2@minio:9000/bucket/x", "hunter2"),
        ("as://account/container/models?sv=2024-11-04&sp=r&sig=hunter2%3D", "hunter2"),
        ("s3://bucket/models?X-Amz-Security-Token=hunter2", "hunter2"),
        ("ftp://ann:hunter2@host/models", "hunter2"),
    ],
)
def test_credentials_are_refused_and_not_shown(text: str, secret: str) -> None:
    with pytest.raises(RepositoryError) as raised:
        RemoteAddress.parse(text)
    assert secret not in f"{raised.value}{raised.value.hint}"


@pytest.mark.parametrize(
    "text", ["oci://host:5000/models@sha256:" + DIGITS, "hf://owner/repository@main/x", "s3://h:9000/bucket/a@b/x"]
)
def test_digests_and_revisions_are_not_credentials(text: str) -> None:
    assert RemoteAddress.parse(text)
