"""Listing and fetching from a real S3 server, and what the errors of the services' libraries mean."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

from graphkiln_backend.repository import remote_files as module
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_files import RemoteFiles, translate


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


def test_an_etag_changes_with_the_content(s3_server: str, bucket: Any) -> None:
    files = RemoteFiles(address(f"s3://{s3_server}/models/store"))
    bucket.put_object(Key="store/digits/1/model.onnx", Body=b"one")
    bucket.put_object(Key="store/digits/.hidden", Body=b"")
    bucket.put_object(Key="store/digits/2/", Body=b"")
    first = files.list()
    assert list(first) == ["digits/1/model.onnx"]
    assert first["digits/1/model.onnx"].size == 3
    bucket.put_object(Key="store/digits/1/model.onnx", Body=b"two")
    assert files.list()["digits/1/model.onnx"].stamp != first["digits/1/model.onnx"].stamp


def test_a_file_is_fetched(s3_server: str, bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="store/digits/1/model.onnx", Body=b"content")
    files = RemoteFiles(address(f"s3://http://{s3_server}/models/store"))
    files.list()
    files.fetch("digits/1/model.onnx", tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == b"content"


def test_names_that_are_no_paths_are_left_out(s3_server: str, bucket: Any) -> None:
    for key in ("store/m/1/../../../etc/x", "store/m/1/a\\b", "store/m/1/good"):
        bucket.put_object(Key=key, Body=b"")
    assert list(RemoteFiles(address(f"s3://{s3_server}/models/store")).list()) == ["m/1/good"]


@pytest.mark.usefixtures("s3_server")
def test_a_bucket_that_is_missing(s3_server: str) -> None:
    with pytest.raises(RemoteStoreError, match="no such bucket") as raised:
        RemoteFiles(address(f"s3://{s3_server}/nosuch/store")).list()
    assert not raised.value.passing


@pytest.mark.usefixtures("s3_server")
def test_a_server_that_is_not_there() -> None:
    with pytest.raises(RemoteStoreError, match="cannot be reached") as raised:
        RemoteFiles(address("s3://127.0.0.1:1/models/store")).list()
    assert raised.value.passing
    assert "network" in raised.value.hint


def test_no_credentials(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RemoteStoreError, match="no credentials") as raised:
        RemoteFiles(address(f"s3://{s3_server}/models/store")).list()
    assert "AWS_PROFILE" in raised.value.hint


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("fsspec"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RemoteStoreError, match="gs:// needs gcsfs") as raised:
        RemoteFiles(address("gs://bucket/store")).list()
    assert raised.value.hint.startswith("pip install 'graphkiln[remote]'")


def test_access_that_is_denied() -> None:
    class ClientAuthenticationError(Exception): ...

    class HfHubHTTPError(Exception):
        status_code = 403

    for error in (PermissionError("no"), ClientAuthenticationError("no"), HfHubHTTPError("no")):
        translated = translate(error, address("hf://owner/repository"))
        assert "access is denied" in str(translated)
        assert "HF_TOKEN" in translated.hint


def test_the_cause_of_an_error_counts() -> None:
    class NoCredentialsError(Exception): ...

    wrapped = OSError("something")
    wrapped.__cause__ = NoCredentialsError()
    assert "no credentials" in str(translate(wrapped, address("s3://bucket")))


def test_what_is_not_known_is_told_in_a_line_and_may_pass() -> None:
    translated = translate(RuntimeError("a\nb" * 500), address("s3://bucket"))
    assert translated.passing
    assert "\n" not in str(translated)
    assert len(str(translated)) < 300


@pytest.mark.parametrize("scheme", ["gs", "as", "hf"])
def test_the_other_services_by_a_file_system_in_memory(
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


@pytest.mark.parametrize(
    ("text", "protocol"), [("gs://b/x", "gcs"), ("as://a/c/x", "abfs"), ("hf://o/r/x", "hf"), ("s3://b/x", "s3")]
)
def test_each_kind_has_its_client(text: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(fsspec, "filesystem", lambda name, **options: asked.append((name, options)))
    module.open_file_system(address(text))
    assert asked[0][0] == protocol
    assert asked[0][1].get("account_name") == ("a" if protocol == "abfs" else None)


def test_what_nothing_can_be_called_is_no_trouble_that_passes() -> None:
    from botocore.exceptions import ParamValidationError

    translated = translate(ParamValidationError(report='Invalid bucket name "a b"'), address("s3://bucket"))
    assert not translated.passing
    assert 'Invalid bucket name "a b"' in str(translated)


def test_a_library_prints_no_stack_of_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's client logged both errors of a name that no server has, eighty lines, before we told it in one."""
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: None)
    logger = logging.getLogger("gcsfs")
    before = logger.level
    try:
        for level, is_heard in (
            (logging.NOTSET, False),
            (logging.DEBUG, True),
        ):  # as whoever looks for something sets it
            logger.setLevel(level)
            module.open_file_system(address("gs://bucket"))
            assert logger.isEnabledFor(logging.ERROR) is is_heard
    finally:
        logger.setLevel(before)
