"""The model of a run is found on each node, and every node takes the same version."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.scoring import model as model_fetch
from graphkiln_backend.scoring.model import with_local_model, with_version
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.storage.address import RemoteAddress


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in ("2", "10"):
        (tmp_path / "store" / "m" / version).mkdir(parents=True)
    return tmp_path / "store" / "m"


@pytest.fixture
def fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the remote store, which has the same model."""
    asked: list[str] = []

    def fetch(address: RemoteAddress, _: Path) -> Path:
        asked.append(f"{address} {address.root}")
        name = address.root.rpartition("/")[2]
        return model / name if name.isdigit() else model

    monkeypatch.setattr(model_fetch, "fetch_model", fetch)
    return asked


def request(model: Path | str, version: int | None = None) -> ScoreRequest:
    return ScoreRequest(source="photos", destination="answers", model=model, version=version)


def test_the_newest_version_becomes_the_one_that_every_worker_takes(model: Path, tmp_path: Path) -> None:
    found = with_local_model(request(model), tmp_path)
    assert (found.model, found.version) == (model, 10)
    assert with_local_model(request(model, 2), tmp_path).version == 2


def test_a_version_that_is_not_there_is_told_with_those_that_are(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"model 'm' has no version 7 \(it has 2, 10\)"):
        with_local_model(request(model, 7), tmp_path)


def test_a_relative_path_becomes_absolute(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_local_model(request("store/m"), tmp_path).model == model


def test_what_is_in_a_remote_store_is_fetched(
    fetched: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch.RemoteFiles, "list", lambda _: ["2/model.onnx", "10/model.onnx"])
    newest = with_local_model(request("s3://bucket/store/m"), tmp_path)
    named = with_local_model(request("s3://bucket/store/m", 2), tmp_path)
    assert fetched == [f"s3://bucket/store/m/{number} bucket/store/m/{number}" for number in (10, 2)]
    assert [(each.model, each.version) for each in (newest, named)] == [(model, 10), (model, 2)]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError):
        with_local_model(request(tmp_path / "nothing"), tmp_path)


def test_the_version_that_a_record_names(model: Path) -> None:
    assert with_version(request(model)).version == 10
    assert with_version(request(model, 2)).version == 2


def test_of_a_remote_store_only_the_listing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["config.pbtxt", "2/model.onnx", "10/model.onnx", "old/model.onnx"]
    monkeypatch.setattr(model_fetch.RemoteFiles, "list", lambda _: listed)
    assert with_version(request("s3://bucket/store/m")).version == 10
    listed[:] = ["config.pbtxt"]
    with pytest.raises(RepositoryError, match="no model at s3://bucket/store/m"):
        with_version(request("s3://bucket/store/m"))
