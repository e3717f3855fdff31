"""The models that take images for others: they come, follow and go with them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import zoo

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.config import BACKEND, ModelConfigProto, read_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server import image_models as module
from graphkiln_backend.server.image_models import add_image_models, describe_images, find_taker
from graphkiln_backend.server.managed_stores import ManagedStores
from graphkiln_backend.server.mirror import Mirror

SPEC = json.dumps(Preprocess(crop=(3, 3)).to_json())
ACCEPTS = 'parameters { key: "accept_images" value { string_value: "true" } }'
IMAGES = f'{ACCEPTS} parameters {{ key: "preprocess" value {{ string_value: {SPEC} }} }} version_policy {{ all {{ }} }}'
SHAPE = ("batch", 3, 3, 3)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    zoo.add(tmp_path / "store", "cats", zoo.scale(SHAPE), IMAGES)
    zoo.add(tmp_path / "store", "plain", zoo.scale(SHAPE))
    return tmp_path / "store"


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "overlay")


def opened(store: Path, mirror: Mirror) -> ManagedStores:
    stores = ManagedStores([store])
    stores.open(mirror, frozenset({BACKEND}), lambda version: version)
    return stores


def test_only_models_that_accept_images_have_one(store: Path) -> None:
    models = add_image_models(scan_stores([store]))
    assert [*models] == ["cats", "plain", "cats.images"]
    assert models["cats.images"].name == "cats.images"


def test_a_configuration_is_read_again_when_it_has_changed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=read_config)
    monkeypatch.setattr(module, "read_config", read)
    for _ in range(3):
        add_image_models(scan_stores([store]))
    assert read.call_count <= 2
    (store / "plain" / "config.pbtxt").write_text(IMAGES)
    assert "plain.images" in add_image_models(scan_stores([store]))


def test_it_is_shown_with_the_versions_of_the_other(store: Path, mirror: Mirror) -> None:
    zoo.add(store, "cats", zoo.scale(SHAPE), IMAGES, version=2)
    stores = opened(store, mirror)
    shown = mirror.path / "cats.images"
    assert stores.served["cats.images"].versions == (1, 2)
    assert all("TritonPythonModel" in (shown / number / "model.py").read_text() for number in "12")
    assert read_config(shown / "config.pbtxt").input[0].name == "IMAGE"
    assert read_config(mirror.path / "cats" / "config.pbtxt").parameters["image_model"].string_value == "cats.images"


def test_it_follows_when_a_version_fails(store: Path, mirror: Mirror) -> None:
    zoo.add(store, "cats", zoo.scale(SHAPE), IMAGES, version=2)
    stores = opened(store, mirror)
    assert not stores.is_outdated(stores.served["cats.images"])
    cats = stores.served["cats"]
    stores.quarantine.add(cats.stored, 2, "it crashed")
    stores.present(mirror, stores.plan(cats.stored, (1, 2)))
    images = stores.served["cats.images"]
    assert stores.is_outdated(images)
    stores.present(mirror, stores.plan(images.stored, ()))
    assert stores.served["cats.images"].versions == (1,)
    assert not (mirror.path / "cats.images" / "2").exists()


def test_without_a_version_it_says_why(store: Path, mirror: Mirror) -> None:
    (store / "cats" / "1" / "model.onnx").write_bytes(b"PK")
    stores = opened(store, mirror)
    assert stores.refusals()["cats.images", "1"] == "no version of 'cats' is served"


def test_a_model_that_takes_no_images_is_served_without_one(tmp_path: Path, mirror: Mirror) -> None:
    zoo.add(tmp_path / "store", "cats", zoo.scale(SHAPE), ACCEPTS)
    stores = opened(tmp_path / "store", mirror)
    assert stores.served["cats"].versions == (1,)
    assert "image_model" not in read_config(mirror.path / "cats" / "config.pbtxt").parameters
    assert "nothing says how an image becomes its input" in stores.refusals()["cats.images", "1"]
    images = stores.served["cats.images"]
    assert not stores.is_outdated(images)  # else it would be loaded again and again
    assert stores.plan(images.stored, ()).versions == ()


def test_a_folder_of_its_name_is_a_problem(store: Path, mirror: Mirror) -> None:
    zoo.add(store, "cats.images", zoo.scale(SHAPE))
    stores = opened(store, mirror)
    assert "rename it" in stores.refusals()["cats.images", "1"]


def test_a_word_that_is_no_answer_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    zoo.add(tmp_path / "store", "cats", zoo.scale(SHAPE), ACCEPTS.replace("true", "yes"))
    stores = opened(tmp_path / "store", mirror)
    assert "accept_images must be true or false, got 'yes'" in stores.refusals()["cats", "1"]


def test_a_model_of_another_backend_takes_no_images(store: Path, mirror: Mirror) -> None:
    """It was said that none of its versions is served, and it was looked at as outdated for ever."""
    (store / "cats" / "config.pbtxt").write_text(f'backend: "python" {IMAGES}')
    stores = opened(store, mirror)
    assert stores.served["cats"].versions == (1,)
    images = stores.served["cats.images"]
    assert "accept_images of 'cats': the model is of another backend" in stores.refusals()["cats.images", "1"]
    assert not stores.is_outdated(images)
    assert stores.plan(images.stored, ()).versions == ()


class TestDescribeImages:
    def test_what_is_taken_and_how(self, store: Path, mirror: Mirror) -> None:
        config = opened(store, mirror).served["cats"].config
        assert config is not None
        told = describe_images(config)
        assert told.startswith("JPEG, PNG, WEBP, BMP, GIF, TIFF by cats.images, decoded in ")

    def test_why_nothing_is(self) -> None:
        told = describe_images(ModelConfigProto(name="cats"))
        assert told.startswith("none are taken: parameters: accept_images of 'cats'")


def test_who_takes_images_takes_shared_memory_too(store: Path, mirror: Mirror) -> None:
    """Samples pass through it: a batch of them was counted as nothing, and failed where there was no room."""
    stores = opened(store, mirror)
    config, plain = stores.served["cats"].config, stores.served["plain"].config
    assert config is not None
    assert plain is not None
    taker = find_taker(config)
    assert taker is not None
    row = ModelConfig.from_protobuf(config, has_gpu=False).row_bytes
    assert ModelConfig.from_protobuf(taker, has_gpu=False).row_bytes == row
    assert find_taker(plain) is None
