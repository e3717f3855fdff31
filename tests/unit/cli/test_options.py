"""Paths of versions, local and remote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import convert, run, write_source

from graphkiln.cli.options import version_folder
from graphkiln.doctor.examination import Request
from graphkiln.doctor.models import check_remote_stores
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import remote_model
from graphkiln_backend.storage.address import RemoteAddress


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in ("2", "10"):
        (tmp_path / "m" / version).mkdir(parents=True)
        (tmp_path / "m" / version / "model.onnx").touch()
    return tmp_path / "m"


def test_version_folder(model: Path) -> None:
    assert version_folder(model / "2") == model / "2"
    assert version_folder(model / "2" / "model.onnx") == model / "2"
    assert version_folder(model) == model / "10"


# Verbs with remote models, which leave no temporary files.


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def store(s3_server: str, bucket: Any, version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store on S3 with the model `m`; check that no temporary folders are left."""
    model = version.parent
    for path in (path for path in model.rglob("*") if path.is_file()):
        bucket.put_object(Key=f"store/m/{path.relative_to(model)}", Body=path.read_bytes())
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield f"s3://{s3_server}/models/store"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_verify_explain_and_lower(store: str, tmp_path: Path) -> None:
    for words in (
        ("verify", f"{store}/m", "--json"),
        ("explain", f"{store}/m/1", "--json", "--cache", "off"),
        ("lower", f"{store}/m", "--json", "--cache", tmp_path / "cache"),
        ("inspect", f"{store}/m/1/model.onnx", "--json"),
    ):
        finished = run(*words)
        assert finished.exit_code == 0, (words, finished.output, finished.exception)
        assert json.loads(finished.stdout)


@pytest.mark.parametrize("verb", ["verify", "explain", "lower", "inspect"])
def test_remote_paths_are_fetched(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(address: RemoteAddress, _: Path) -> Path:
        raise RepositoryError(f"{address} is not there")

    monkeypatch.setattr(remote_model, "fetch_path", fetch)
    assert str(run(verb, "s3://bucket/store/m").exception) == "s3://bucket/store/m is not there"


@pytest.mark.slow
def test_convert_remote_graph(store: str, s3_server: str, bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="graphs/tiny.onnx", Body=write_source(tmp_path).read_bytes())
    source = f"s3://{s3_server}/models/graphs/tiny.onnx"
    finished = run("convert", source, "--model-store", tmp_path / "out", "--json")
    assert finished.exit_code == 0, (finished.output, finished.exception, store)
    manifest = json.loads((tmp_path / "out" / "tiny" / "1" / "manifest.json").read_text())
    assert manifest["conversion"]["recipe"]["source"] == source
    assert manifest["provenance"]["source"] == source


@pytest.mark.slow
def test_doctor_examines_one_model(store: str) -> None:
    address = RemoteAddress.parse(f"{store}/m")
    assert address
    found = {finding.subject: finding for finding in check_remote_stores(Request(remote=(address,)))}
    assert "whole, golden samples" in found["m"].message
    assert "serve takes the store" in found[f"{store}/m"].hint
