"""Listing and fetching from an S3 server, credentials, and translated errors of the services' libraries."""

from __future__ import annotations

import builtins
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from graphkiln_backend.storage import files as module
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import VARIABLE, RemoteFiles, call_each, client_options, translate


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


def test_list(s3_server: str, bucket: Any) -> None:
    files = RemoteFiles(address(f"s3://{s3_server}/models/store"))
    bucket.put_object(Key="store/digits/1/model.onnx", Body=b"one")
    bucket.put_object(Key="store/digits/.hidden", Body=b"")
    bucket.put_object(Key="store/digits/2/", Body=b"")
    first = files.list()
    assert list(first) == ["digits/1/model.onnx"]
    assert first["digits/1/model.onnx"].size == 3
    bucket.put_object(Key="store/digits/1/model.onnx", Body=b"two")
    assert files.list()["digits/1/model.onnx"].stamp != first["digits/1/model.onnx"].stamp


def test_unsafe_names_are_left_out(s3_server: str, bucket: Any) -> None:
    for key in ("store/m/1/../../../etc/x", "store/m/1/a\\b", "store/m/1/good"):
        bucket.put_object(Key=key, Body=b"")
    assert list(RemoteFiles(address(f"s3://{s3_server}/models/store")).list()) == ["m/1/good"]


@pytest.mark.usefixtures("s3_server")
def test_missing_bucket(s3_server: str) -> None:
    with pytest.raises(RemoteStoreError, match="no such bucket") as raised:
        RemoteFiles(address(f"s3://{s3_server}/nosuch/store")).list()
    assert not raised.value.passing


@pytest.mark.usefixtures("s3_server")
def test_unreachable_server() -> None:
    with pytest.raises(RemoteStoreError, match="cannot be reached") as raised:
        RemoteFiles(address("s3://127.0.0.1:1/models/store")).list()
    assert raised.value.passing
    assert "network" in raised.value.hint


def test_missing_credentials(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RemoteStoreError, match="no credentials") as raised:
        RemoteFiles(address(f"s3://{s3_server}/models/store")).list()
    assert "AWS_PROFILE" in raised.value.hint


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("fsspec"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RemoteStoreError, match="gs:// needs gcsfs") as raised:
        RemoteFiles(address("gs://bucket/store")).list()
    assert raised.value.hint.startswith("pip install 'graphkiln[remote]'")


def test_denied_access() -> None:
    class ClientAuthenticationError(Exception): ...

    class HfHubHTTPError(Exception):
        status_code = 403

    for error in (PermissionError("no"), ClientAuthenticationError("no"), HfHubHTTPError("no")):
        translated = translate(error, address("hf://owner/repository"))
        assert "access is denied" in str(translated)
        assert "HF_TOKEN" in translated.hint


def test_cause_of_an_error() -> None:
    class NoCredentialsError(Exception): ...

    wrapped = OSError("something")
    wrapped.__cause__ = NoCredentialsError()
    assert "no credentials" in str(translate(wrapped, address("s3://bucket")))


def test_unknown_error() -> None:
    translated = translate(RuntimeError("a\nb" * 500), address("s3://bucket"))
    assert translated.passing
    assert "\n" not in str(translated)
    assert len(str(translated)) < 300


@pytest.mark.parametrize("scheme", ["gs", "as", "hf"])
def test_other_services_with_a_file_system_in_memory(
    scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/owner/repository/store/digits/1/model.onnx", b"content")
    monkeypatch.setattr(module, "open_file_system", lambda _: memory)
    text = {"as": "as://account/owner/repository/store"}.get(scheme, f"{scheme}://owner/repository/store")
    files = RemoteFiles(address(text))
    assert files.list()["digits/1/model.onnx"].size == 7
    files.fetch("digits/1/model.onnx", tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == b"content"
    memory.rm("/owner", recursive=True)


def test_invalid_bucket_name() -> None:
    from botocore.exceptions import ParamValidationError

    translated = translate(ParamValidationError(report='Invalid bucket name "a b"'), address("s3://bucket"))
    assert not translated.passing
    assert 'Invalid bucket name "a b"' in str(translated)


def test_gcsfs_does_not_log_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: None)
    logger = logging.getLogger("gcsfs")
    before = logger.level
    try:
        for level, is_heard in ((logging.NOTSET, False), (logging.DEBUG, True)):
            logger.setLevel(level)
            module.open_file_system(address("gs://bucket"))
            assert logger.isEnabledFor(logging.ERROR) is is_heard
    finally:
        logger.setLevel(before)


# Triton's file of credentials.

S3 = {"secret_key": "hidden", "key_id": "id", "region": "eu-west-1", "session_token": "", "profile": ""}
DOCUMENT = {
    "gs": {"": "", "gs://other": "MISSING"},
    "s3": {"": S3, "s3://bucket-2": {"profile": "p"}, "s3://bucket-2/deep": {"key_id": "x", "secret_key": "y"}},
    "as": {"": {"account_str": "", "account_key": "k"}, "as://other/c": {"account_str": "name", "account_key": "k2"}},
}


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
def test_credentials_of_the_longest_prefix(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert options(text, tmp_path) == expected


def test_service_account_of_google(tmp_path: Path) -> None:
    (tmp_path / "account.json").write_text("{}")
    path = str(tmp_path / "account.json")
    assert options("gs://bucket/a", tmp_path, {"gs": {"": path}}) == {"token": path}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AZURE_STORAGE_KEY": "k"}, {"account_key": "k"}),
        ({"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_ACCOUNT": "account"}, {"account_key": "k"}),
        ({"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_ACCOUNT": "another"}, {}),
    ],
)
def test_variables_of_azure(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert client_options(address("as://account/c"), environment) == expected
    assert client_options(address("s3://bucket/c"), environment) == {}


@pytest.mark.parametrize(
    ("text", "document", "words"),
    [
        ("s3://b/a", [], "is not a JSON object"),
        ("s3://b/a", {"s3": "x"}, "'s3' must be an object of credentials by address"),
        ("s3://b/a", {"s3": {"": "hidden"}}, "must be an object of key_id, secret_key"),
        ("s3://b/a", {"s3": {"": {"key": "hidden"}}}, "unknown key 'key' in 's3'"),
        ("s3://b/a", {"s3": {"": {"key_id": 5}}}, "'key_id' in 's3' must be text"),
        ("gs://b/a", {"gs": {"": {"key": "hidden"}}}, "must be the path of a service account"),
        ("gs://other/a", DOCUMENT, "names MISSING for 'gs', which is not a file"),
    ],
)
def test_invalid_credentials_are_not_shown(text: str, document: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RemoteStoreError, match=words) as raised:
        options(text, tmp_path, document)
    assert VARIABLE in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert not raised.value.passing


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), (b"{", "is not JSON"), (b"\xff", "not JSON")])
def test_unreadable_credentials(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(RemoteStoreError, match=words):
        client_options(address("s3://b/a"), {VARIABLE: str(tmp_path / "c.json")})


def test_store_is_read_with_the_credentials(
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


# Concurrent calls.

SIGNALLED = """
import os, signal, sys, threading
from graphkiln_backend.storage.files import call_each

def end(*_):
    raise SystemExit(7)

def hang(item):
    print("called", item, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

signal.signal(signal.SIGTERM, end)
call_each(hang, range(9), 1)
"""


def test_call_each_stops_at_the_first_error() -> None:
    seen: list[int] = []

    def fail_at_two(item: int) -> None:
        seen.append(item)
        if item == 2:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        call_each(fail_at_two, range(9), 1)
    assert seen == [0, 1, 2]


def test_hanging_calls_do_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (7, "called 0\n"), ended.stderr
