"""Sources that lie in remote stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ConversionError, RepositoryError
from graphkiln_backend.repository.remote_address import RemoteAddress
from graphkiln_converters import remote_source
from graphkiln_converters.remote_source import local_source, remote_part


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("s3://b/m.onnx", ("", "s3://b/m.onnx")),
        ("sklearn:gs://b/m.skops", ("sklearn:", "gs://b/m.skops")),
        ("torchvision:resnet18", ("", "")),
        ("python:m.py:make", ("", "")),
        ("models/m.onnx", ("", "")),
    ],
)
def test_what_is_an_address(source: str, parts: tuple[str, str]) -> None:
    assert remote_part(source) == parts


def test_a_file_is_there_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(address: RemoteAddress, folder: Path) -> Path:
        (folder / "m.skops").write_text(str(address))
        return folder / "m.skops"

    monkeypatch.setattr(remote_source, "fetch_file", fetch)
    with local_source("sklearn:s3://b/m.skops") as source:
        kind, _, path = source.partition(":")
        assert (kind, Path(path).read_text()) == ("sklearn", "s3://b/m.skops")
    assert not Path(path).parent.exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://h/m.onnx", "download the file"),
        ("s3://b/models", "names no file of a model"),
        ("s4://b/m.onnx", "s4:// are not known"),
        ("s3://m.onnx", "name a model in it"),
    ],
)
def test_what_cannot_be_one(source: str, words: str) -> None:
    with pytest.raises((ConversionError, RepositoryError), match=words), local_source(source):
        pass
