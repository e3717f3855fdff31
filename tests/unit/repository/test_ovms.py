"""Stores of OpenVINO Model Server: every key of a `config.json` is honored, named as without effect, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.ovms import OvmsStore, read_ovms


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in "12":
        (tmp_path / "models" / "resnet" / version).mkdir(parents=True)
    return tmp_path


def write(store: Path, *models: dict[str, Any], **others: Any) -> Path:
    document = {"model_config_list": [{"config": model} for model in models], **others}
    (store / "config.json").write_text(json.dumps(document))
    return store


def read(store: Path, **keys: Any) -> OvmsStore:
    found = read_ovms(write(store, {"name": "m", "base_path": "models/resnet", **keys}))
    assert found
    return found


class TestModels:
    def test_path_is_relative_to_the_file(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = store / "models" / "resnet"
        write(store, {"name": "a", "base_path": "models/resnet"}, {"name": "b", "base_path": str(folder)})
        monkeypatch.chdir(store)
        for path in (store, store / "config.json", Path(), Path("config.json")):
            found = read_ovms(path)
            assert found
            assert [(each.name, each.folder) for each in found.models] == [("a", folder), ("b", folder)]

    def test_properties(self, store: Path) -> None:
        (model,) = read(store, plugin_config={"NUM_STREAMS": 2, "HINT_BF16": True}, target_device="CPU").models
        assert model.properties == {"NUM_STREAMS": "2", "HINT_BF16": "YES", "TARGET_DEVICE": "CPU"}

    @pytest.mark.parametrize(
        ("key", "value"), [("nireq", 4), ("allow_cache", True), ("batch_size", "auto"), ("shape", "auto")]
    )
    def test_keys_without_effect_are_named(self, store: Path, key: str, value: Any) -> None:
        (note,) = read(store, **{key: value}).models[0].notes
        assert f"model 'm': {key} has no effect: " in note

    def test_lists_without_effect_are_named(self, store: Path) -> None:
        write(store, {"name": "m", "base_path": "x"}, pipeline_config_list=[{}], mediapipe_config_list=[])
        found = read_ovms(store)
        assert found
        (note,) = found.notes
        assert "pipeline_config_list: pipelines are not served" in note

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("batch_size", 8),
            ("shape", {"x": "(1,3,8,8)"}),
            ("layout", "NHWC:NCHW"),
            ("mean", "[1,2,3]"),
            ("stateful", True),
            ("custom_loader_options", {"loader_name": "l"}),
        ],
    )
    def test_keys_that_change_answers_are_refused(self, store: Path, key: str, value: Any) -> None:
        with pytest.raises(RepositoryError, match=f"model 'm': {key} cannot be met"):
            read(store, **{key: value})
        assert read(store, **{key: None})


class TestLinks:
    def test_new_versions_of_a_linked_model_are_seen(self, store: Path, tmp_path: Path) -> None:
        links = tmp_path / "links"
        links.mkdir()
        read(store).link(links)
        (store / "models" / "resnet" / "3").mkdir()
        assert sorted(path.name for path in (links / "m").iterdir()) == ["1", "2", "3"]

    def test_version_policy_joins_the_configuration(self, store: Path, tmp_path: Path) -> None:
        (store / "models" / "resnet" / "config.pbtxt").write_text("max_batch_size: 8")
        links = tmp_path / "links"
        links.mkdir()
        read(store, model_version_policy={"specific": {"versions": [1]}}).link(links)
        config = read_config(links / "m" / "config.pbtxt")
        assert (config.max_batch_size, list(config.version_policy.specific.versions)) == (8, [1])
        assert (links / "m" / "1").is_dir()
        assert "specific" not in (store / "models" / "resnet" / "config.pbtxt").read_text()

    def test_missing_folder_is_left_to_the_scan(self, store: Path, tmp_path: Path) -> None:
        write(store, {"name": "m", "base_path": "missing", "model_version_policy": {"all": {}}})
        links = tmp_path / "links"
        links.mkdir()
        found = read_ovms(store)
        assert found
        found.link(links)
        assert (links / "m").is_symlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_config_list": 1}', "has no list"),
        ('{"model_config_list": [], "modell": 1}', "unknown key 'modell'"),
        ('{"model_config_list": [', "cannot be read"),
        ('{"model_config_list": [1]}', r"\[0\] must be an object"),
        ('{"model_config_list": [{"config": {"name": "m"}}]}', "needs a `name` and a `base_path`"),
        ('{"model_config_list": [{"config": {"name": "a b", "base_path": "x"}}]}', "is not a model name"),
        ('{"model_config_list": [{"config": {"name": "m", "base_path": "s3://b/m"}}]}', "not a folder of this machine"),
        ('{"model_config_list": [{"config": {"name": "m", "base_path": "x", "nirek": 1}}]}', "did you mean 'nireq'"),
        (
            '{"model_config_list": [{"config": {"name": "m", "base_path": "x", "model_version_policy": {"al": {}}}}]}',
            "model_version_policy",
        ),
        (
            '{"model_config_list": [{"config": {"name": "m", "base_path": "x", "plugin_config": {"A": []}}}]}',
            "A must be a word or a number",
        ),
        (
            json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "x"}}] * 2}),
            "two models named 'm'",
        ),
    ],
)
def test_malformed_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RepositoryError, match=message):
        read_ovms(tmp_path)


@pytest.mark.parametrize("content", [None, '{"architectures": []}', "not JSON"])
def test_other_stores(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert read_ovms(tmp_path) is None
    assert read_ovms(tmp_path / "missing") is None
