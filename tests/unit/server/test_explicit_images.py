"""Models that take images in the user's explicit mode: they come and go with those whose images they take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_repository import FakeTriton

from graphkiln_backend.graph.preprocess import CONFIG_LINE
from graphkiln_backend.server.image_models import ExplicitImages
from graphkiln_backend.server.mirror import Mirror

TAKER = "digits.images"


class Setup:
    """A store with one model that accepts images, and who looks after it."""

    def __init__(self, digits: Path, folder: Path) -> None:
        self.store = folder / "store"
        shutil.copytree(digits, self.store / "digits")
        self.config = self.store / "digits" / "config.pbtxt"
        self.written = self.config.read_text()
        self.configure(f"{self.written}\n{CONFIG_LINE}\n")
        self.triton = FakeTriton(self.store)
        self.mirror = Mirror(folder / "images")
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
    assert setup.follow({"digits": (1,)}) == [1]


def test_another_configuration_is_loaded(setup: Setup) -> None:
    setup.follow({"digits": (1,)})
    setup.configure(setup.config.read_text())
    setup.follow({"digits": (1,)})
    assert setup.triton.loads == [TAKER, TAKER]


def test_who_loads_it_alone_reads_what_to_load(setup: Setup) -> None:
    setup.follow({})
    assert setup.images.takes_images(TAKER)
    assert "is loaded and unloaded with it: load 'digits'" in setup.placeholder()


def test_a_model_that_no_longer_accepts_images(setup: Setup) -> None:
    setup.follow({"digits": (1,)})
    setup.configure(setup.written)
    assert setup.follow({"digits": (1,)}) == []
    assert not (setup.mirror.path / TAKER).exists()
    assert not setup.images.takes_images(TAKER)


def test_a_model_that_can_have_none(setup: Setup, logged: list[str]) -> None:
    setup.configure(f"{setup.written}\n{CONFIG_LINE}\nsequence_batching {{ }}\n".replace("dynamic_batching {\n}", ""))
    assert setup.follow({"digits": (1,)}) == []
    assert "takes no encoded images" in setup.placeholder()
    assert any(message.startswith(f"{TAKER} is not served") for message in logged)
    setup.follow({"digits": (1,)})
    assert setup.triton.loads == []


def test_a_model_of_that_name_is_left_alone(setup: Setup) -> None:
    shutil.copytree(setup.store / "digits", setup.store / TAKER)
    (setup.store / TAKER / "config.pbtxt").write_text(setup.written.replace('"digits"', f'"{TAKER}"'))
    assert setup.follow({"digits": (1,)}) == []
    assert not (setup.mirror.path / TAKER).exists()
