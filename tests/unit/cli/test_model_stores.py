"""What `serve` makes of the paths that it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln.cli.options import open_stores
from graphkiln_backend.graph.errors import ServerSetupError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three models: with and without a configuration, and one whose name is a number."""
    for file in ("bare/1/model.onnx", "bare/2/model.onnx", "7/1/model.onnx", "ready/config.pbtxt", "ready/1/x"):
        (tmp_path / "store" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / file).touch()
    return tmp_path / "store"


def test_a_store_is_served_as_it_is(store: Path) -> None:
    with open_stores([store]) as stores:
        assert stores == [store]


def test_an_empty_store_too(tmp_path: Path) -> None:
    with open_stores([tmp_path]) as stores:
        assert stores == [tmp_path]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("bare", "bare"),
        ("bare/1", "bare"),
        ("bare/1/model.onnx", "bare"),
        ("ready", "ready"),
        ("7", "7"),
        ("7/1", "7"),
    ],
)
def test_a_model_is_served_alone(store: Path, path: str, name: str) -> None:
    with open_stores([store / path]) as stores:
        (chosen,) = stores
        assert [(entry.name, entry.resolve()) for entry in chosen.iterdir()] == [(name, store / name)]
    assert not chosen.exists()
    assert (store / name).exists()


def test_models_and_stores_together(store: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with open_stores([store / "bare", tmp_path / "other", store / "ready", store / "ready"]) as stores:
        first, second = stores
        assert first == tmp_path / "other"
        assert sorted(entry.name for entry in second.iterdir()) == ["bare", "ready"]


def test_a_relative_path(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store / "bare")
    with open_stores([Path()]) as (chosen,):
        assert [entry.resolve() for entry in chosen.iterdir()] == [store / "bare"]


def test_two_models_of_one_name(store: Path, tmp_path: Path) -> None:
    (tmp_path / "again" / "bare" / "1").mkdir(parents=True)
    with (
        pytest.raises(ServerSetupError, match="two models are named bare"),
        open_stores([store / "bare", tmp_path / "again" / "bare"]),
    ):
        pass


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("net.onnx", r"is a graph, not a model store \(graphkiln convert .*net\.onnx --model-store models"),
        ("text.txt", r"text\.txt' is not a folder"),
        ("nowhere/deep", "is missing.*name a folder of models: --model-store DIR"),
        ("stor", r"is missing \(did you mean '.*/store'\?: --model-store DIR\)"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_is_neither(tmp_path: Path, path: str, words: str) -> None:
    for name in ("net.onnx", "text.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ServerSetupError, match=words), open_stores([tmp_path / path]):
        pass


def test_a_folder_that_may_not_be_opened(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system answers who is not root: tests/image asks the real one."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != store or mode != os.R_OK | os.X_OK)
    words = rf"cannot be read by user \d+ \(chmod -R a\+rX {store}"
    with pytest.raises(ServerSetupError, match=words), open_stores([store]):
        pass
