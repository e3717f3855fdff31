"""What `graphkiln doctor` says of remote stores."""

from __future__ import annotations

import pytest

from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.storage import check_remote_stores, is_one_model
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles

ADDRESS = RemoteAddress.parse("s3://bucket/store")
assert ADDRESS


@pytest.mark.parametrize(
    ("listing", "level", "words"),
    [
        ({"a/1/model.onnx": RemoteFile("x", 2048), "b/1/x": RemoteFile("y", 0)}, Level.OK, "2 models, 2 files, 2 kB"),
        ({"README.md": RemoteFile("x", 9)}, Level.WARNING, "holds no model"),
        (RemoteStoreError("s3://bucket/store: access is denied", hint="AWS_PROFILE"), Level.ERROR, "access is denied"),
    ],
)
def test_what_is_there(
    listing: dict[str, RemoteFile] | Exception, level: Level, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_(_: RemoteFiles) -> dict[str, RemoteFile]:
        if isinstance(listing, Exception):
            raise listing
        return listing

    monkeypatch.setattr(RemoteFiles, "list", list_)
    (finding,) = check_remote_stores(Request(remote=(ADDRESS,)))
    assert (finding.subject, finding.level) == ("s3://bucket/store", level)
    assert words in finding.message


@pytest.mark.parametrize(
    ("listing", "is_model"),
    [
        (["1/model.onnx", "2/model.onnx"], True),
        (["config.pbtxt"], True),
        (["model.onnx", "golden.npz"], True),
        (["m/1/model.onnx"], False),
        (["README.md"], False),
        ([], False),
    ],
)
def test_a_model_is_told_from_a_store(listing: list[str], is_model: bool) -> None:
    assert is_one_model(listing) is is_model
