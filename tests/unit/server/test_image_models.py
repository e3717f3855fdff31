"""The models that take images for others: they come, follow and go with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import zoo
from fake_repository import FakeTriton

from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.config import BACKEND, ModelConfigProto, read_config
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server.image_models import ExplicitImages, add_image_models, describe_images
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


def test_it_is_shown_with_the_versions_of_the_other(store: Path, mirror: Mirror) -> None:
    zoo.add(store, "cats", zoo.scale(SHAPE), IMAGES, version=2)
    stores = opened(store, mirror)
    shown = mirror.path / "cats.images"
    assert stores.shown["cats.images"].versions == (1, 2)
    assert all("TritonPythonModel" in (shown / number / "model.py").read_text() for number in "12")
    assert read_config(shown / "config.pbtxt").input[0].name == "IMAGE"
    assert read_config(mirror.path / "cats" / "config.pbtxt").parameters["image_model"].string_value == "cats.images"


def test_it_follows_when_a_version_fails(store: Path, mirror: Mirror) -> None:
    zoo.add(store, "cats", zoo.scale(SHAPE), IMAGES, version=2)
    stores = opened(store, mirror)
    assert not stores.is_outdated(stores.shown["cats.images"])
    cats = stores.shown["cats"]
    stores.quarantine.add(cats.stored, 2, "it crashed")
    stores.present(mirror, stores.plan(cats.stored, (1, 2)))
    images = stores.shown["cats.images"]
    assert stores.is_outdated(images)
    stores.present(mirror, stores.plan(images.stored, ()))
    assert stores.shown["cats.images"].versions == (1,)
    assert not (mirror.path / "cats.images" / "2").exists()


def test_without_a_version_it_says_why(store: Path, mirror: Mirror) -> None:
    (store / "cats" / "1" / "model.onnx").write_bytes(b"PK")
    stores = opened(store, mirror)
    assert stores.refusals()["cats.images", "1"] == "no version of 'cats' is served"


def test_a_model_that_takes_no_images_is_served_without_one(tmp_path: Path, mirror: Mirror) -> None:
    zoo.add(tmp_path / "store", "cats", zoo.scale(SHAPE), ACCEPTS)
    stores = opened(tmp_path / "store", mirror)
    assert stores.shown["cats"].versions == (1,)
    assert "image_model" not in read_config(mirror.path / "cats" / "config.pbtxt").parameters
    assert "no preprocessing" in stores.refusals()["cats.images", "1"]
    images = stores.shown["cats.images"]
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
    """It was reported without served versions, and as outdated at each check."""
    (store / "cats" / "config.pbtxt").write_text(f'backend: "python" {IMAGES}')
    stores = opened(store, mirror)
    assert stores.shown["cats"].versions == (1,)
    images = stores.shown["cats.images"]
    assert "accept_images of 'cats': the model is of another backend" in stores.refusals()["cats.images", "1"]
    assert not stores.is_outdated(images)
    assert stores.plan(images.stored, ()).versions == ()


class TestDescribeImages:
    def test_what_is_taken_and_how(self, store: Path, mirror: Mirror) -> None:
        config = opened(store, mirror).shown["cats"].config
        assert config is not None
        described = describe_images(config)
        assert described.startswith("JPEG, PNG, WEBP, BMP, GIF, TIFF by cats.images, decoded in ")

    def test_why_nothing_is(self) -> None:
        described = describe_images(ModelConfigProto(name="cats"))
        assert described.startswith("not accepted: parameters: accept_images of 'cats'")


# Models that take images in the user's explicit mode: they come and go with those whose images they take.

TAKER = "digits.images"


class Setup:
    """A store with one model that accepts images, and who looks after it."""

    def __init__(self, digits: Path, folder: Path) -> None:
        self.store = folder / "store"
        shutil.copytree(digits, self.store / "digits")
        self.config = self.store / "digits" / "config.pbtxt"
        self.written = self.config.read_text()
        self.configure(f"{self.written}\n{ACCEPT_IMAGES_LINE}\n")
        self.mirror = Mirror(folder / "images")
        self.triton = FakeTriton(self.store, self.mirror.path)
        self.images = ExplicitImages(stores=[self.store], mirror=self.mirror, control=self.triton, load_timeout_s=5)

    def configure(self, text: str) -> None:
        before = self.config.stat().st_mtime_ns
        self.config.write_text(text)
        os.utime(self.config, ns=(before + 10**9,) * 2)  # a clock may be coarse

    def follow(self, serving: Mapping[str, tuple[int, ...]]) -> list[int]:
        """The versions that take images afterwards."""
        self.images.follow(serving)
        return self.triton.serving(TAKER)

    def placeholder(self) -> str:
        return (self.mirror.path / TAKER / "1" / "model.py").read_text()


@pytest.fixture
def setup(digits: Path, tmp_path: Path) -> Setup:
    return Setup(digits, tmp_path)


def test_it_comes_and_goes_with_its_model(setup: Setup) -> None:
    assert setup.follow({}) == []
    assert setup.follow({"digits": (1,)}) == [1]
    assert setup.follow({"digits": (1,), TAKER: (1,)}) == [1]
    assert setup.triton.loads == [TAKER], "it is loaded once"
    assert setup.follow({TAKER: (1,)}) == []
    assert "load 'digits'" in setup.placeholder()
    assert setup.follow({"digits": (1,)}) == [1]


def test_a_load_without_a_response_is_sent_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(setup.triton, "load", fail)
        with pytest.raises(ConnectionError):
            setup.follow({"digits": (1,)})
    assert setup.follow({"digits": (1,)}) == [1]


def test_another_configuration_is_loaded(setup: Setup) -> None:
    setup.follow({"digits": (1,)})
    setup.configure(setup.config.read_text())
    setup.follow({"digits": (1,)})
    assert setup.triton.loads == [TAKER, TAKER]


def test_who_loads_it_alone_reads_what_to_load(setup: Setup) -> None:
    setup.follow({})
    assert setup.images.takes_images(TAKER)
    assert "is loaded and unloaded with 'digits': load 'digits'" in setup.placeholder()


def test_a_model_that_no_longer_accepts_images(setup: Setup) -> None:
    setup.follow({"digits": (1,)})
    setup.configure(setup.written)
    assert setup.follow({"digits": (1,)}) == []
    assert not (setup.mirror.path / TAKER).exists()
    assert not setup.images.takes_images(TAKER)


def test_a_model_that_can_have_none(setup: Setup, logged: list[str]) -> None:
    setup.configure(
        f"{setup.written}\n{ACCEPT_IMAGES_LINE}\nsequence_batching {{ }}\n".replace("dynamic_batching {\n}", "")
    )
    assert setup.follow({"digits": (1,)}) == []
    assert "do not support encoded images" in setup.placeholder()
    assert any(message.startswith(f"{TAKER} is not served") for message in logged)
    setup.follow({"digits": (1,)})
    assert setup.triton.loads == []


def test_a_model_of_that_name_is_left_alone(setup: Setup) -> None:
    shutil.copytree(setup.store / "digits", setup.store / TAKER)
    (setup.store / TAKER / "config.pbtxt").write_text(setup.written.replace('"digits"', f'"{TAKER}"'))
    assert setup.follow({"digits": (1,)}) == []
    assert not (setup.mirror.path / TAKER).exists()
