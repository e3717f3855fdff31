"""One version of a model in a remote store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.repository import remote_model
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_model import fetch_model, fetch_path


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


def test_what_triton_does_not_count_is_no_version(store: str, bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="store/digits/011/model.onnx", Body=b"")
    assert fetch(f"{store}/digits", tmp_path)[1][-2:] == ["digits/10/model.onnx", "digits/config.pbtxt"]


def test_the_version_that_is_named(store: str, tmp_path: Path) -> None:
    assert fetch(f"{store}/digits/2", tmp_path) == ("digits/2", ["digits/2/model.onnx", "digits/config.pbtxt"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "there is no model at .*/nosuch"),
        ("nosuch/3", "there is no model at .*/nosuch/3"),
        ("digits/3", r"model 'digits' has no such version \(it has 1, 2, 10\)"),
    ],
)
def test_what_is_not_there(store: str, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RemoteStoreError, match=message):
        fetch(f"{store}/{name}", tmp_path)


def fetch_any(text: str, folder: Path) -> str:
    address = RemoteAddress.parse(text)
    assert address
    return str(fetch_path(address, folder).relative_to(folder))


def test_a_path_is_a_model_a_version_its_graph_or_any_graph(
    store: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_model, "external_files", lambda _: ["m.data", "deep/w", "../x", "/etc/passwd"])
    for key in ("m.onnx", "m.data", "deep/w"):
        bucket.put_object(Key=f"store/{key}", Body=b"x")
    assert fetch_any(f"{store}/digits", tmp_path / "a") == "digits"
    assert fetch_any(f"{store}/digits/2/model.onnx", tmp_path / "b") == "digits/2"
    (tmp_path / "c").mkdir()
    assert fetch_any(f"{store}/m.onnx", tmp_path / "c") == "m.onnx"
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "c")) for path in files) == ["deep/w", "m.data", "m.onnx"]
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_not_there(store: str, tmp_path: Path) -> None:
    with pytest.raises(RemoteStoreError, match=r"store/nosuch\.onnx: there is no such bucket, folder or file"):
        fetch_any(f"{store}/nosuch.onnx", tmp_path)
