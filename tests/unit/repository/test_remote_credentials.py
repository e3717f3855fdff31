"""Triton's file of credentials, and what the services' clients make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_files import VARIABLE, RemoteFiles, client_options

S3 = {"secret_key": "hidden", "key_id": "id", "region": "eu-west-1", "session_token": "", "profile": ""}
DOCUMENT = {
    "gs": {"": "", "gs://other": "MISSING"},
    "s3": {"": S3, "s3://bucket-2": {"profile": "p"}, "s3://bucket-2/deep": {"key_id": "x", "secret_key": "y"}},
    "as": {"": {"account_str": "", "account_key": "k"}, "as://other/c": {"account_str": "name", "account_key": "k2"}},
}


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


def options(text: str, tmp_path: Path, document: Any = None) -> dict[str, Any]:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(DOCUMENT if document is None else document))
    return client_options(address(text), {VARIABLE: str(path)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a", {"key": "id", "secret": "hidden", "client_kwargs": {"region_name": "eu-west-1"}}),
        ("s3://bucket-2/a", {"profile": "p"}),
        ("s3://bucket-2/deep/a", {"key": "x", "secret": "y"}),
        ("gs://bucket/a", {}),
        ("as://account/c/a", {"account_key": "k"}),
        ("as://other/c/a", {"account_name": "name", "account_key": "k2"}),
        ("hf://owner/repository/a", {}),
    ],
)
def test_the_longest_name_counts(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert options(text, tmp_path) == expected


def test_google_is_given_the_path_of_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "account.json").write_text("{}")
    path = str(tmp_path / "account.json")
    assert options("gs://bucket/a", tmp_path, {"gs": {"": path}}) == {"token": path}


def test_without_the_file_the_clients_find_their_own() -> None:
    for text in ("s3://bucket/a", "gs://bucket/a", "as://account/c"):
        assert client_options(address(text), {}) == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AZURE_STORAGE_KEY": "k"}, {"account_key": "k"}),
        ({"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_ACCOUNT": "account"}, {"account_key": "k"}),
        ({"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_ACCOUNT": "another"}, {}),
    ],
)
def test_tritons_variables_of_azure(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert client_options(address("as://account/c"), environment) == expected
    assert client_options(address("s3://bucket/c"), environment) == {}


@pytest.mark.parametrize(
    ("text", "document", "words"),
    [
        ("s3://b/a", [], "is no JSON object"),
        ("s3://b/a", {"s3": "x"}, "'s3' must be an object of credentials by address"),
        ("s3://b/a", {"s3": {"": "hidden"}}, "must be an object of key_id, secret_key"),
        ("s3://b/a", {"s3": {"": {"key": "hidden"}}}, "unknown key 'key' in 's3'"),
        ("s3://b/a", {"s3": {"": {"key_id": 5}}}, "'key_id' in 's3' must be text"),
        ("as://b/a", {"as": {"": {"account_kee": "hidden"}}}, "did you mean 'account_key'"),
        ("gs://b/a", {"gs": {"": {"key": "hidden"}}}, "must be the path of a service account"),
        ("gs://other/a", DOCUMENT, "names MISSING for 'gs', which is no file"),
    ],
)
def test_a_file_that_is_wrong_is_an_error_without_its_secrets(
    text: str, document: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RemoteStoreError, match=words) as raised:
        options(text, tmp_path, document)
    assert VARIABLE in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert not raised.value.passing


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), (b"{", "is not JSON"), (b"\xff", "not JSON")])
def test_a_file_that_cannot_be_read(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(RemoteStoreError, match=words):
        client_options(address("s3://b/a"), {VARIABLE: str(tmp_path / "c.json")})


def test_a_store_is_read_with_them(
    s3_server: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_object(Key="store/m/1/model.onnx", Body=b"x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = address(f"s3://{s3_server}/models/store")
    with pytest.raises(RemoteStoreError, match="no credentials were found"):
        RemoteFiles(store).list()
    (tmp_path / "c.json").write_text(json.dumps({"s3": {"": {**S3, "region": "us-east-1"}}}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "c.json"))
    assert list(RemoteFiles(store).list()) == ["m/1/model.onnx"]
