"""One version of a model in a remote store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.repository.remote_address import RemoteAddress
from graphkiln_backend.repository.remote_files import RemoteStoreError
from graphkiln_backend.repository.remote_model import fetch_model


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


@pytest.mark.parametrize("name", ["nosuch", "digits/3"])
def test_what_is_not_there(store: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(RemoteStoreError, match="there is no model at"):
        fetch(f"{store}/{name}", tmp_path)
