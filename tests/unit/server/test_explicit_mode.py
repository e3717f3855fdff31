"""The user's own explicit mode: what failed leaves no trace, and a crash changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_repository import FakeTriton, StoreOfFakes

from graphkiln_backend.server.explicit_mode import ExplicitKeeper, LoadedModels, may_all_load
from graphkiln_backend.server.managed_stores import ManagedStores
from graphkiln_backend.server.mirror import Mirror, StoreView


class Setup:
    """A server in explicit mode, and a keeper beside it."""

    def __init__(self, store: StoreOfFakes, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.stores = ManagedStores([store.folder])
        self.loaded = LoadedModels()
        self.starts = 0

    def start(self, *models: str) -> None:
        """Starts a server which loads some models."""
        self.starts += 1
        self.mirror = Mirror(self.folder / f"overlay {self.starts}")
        self.view = StoreView(self.folder / f"view {self.starts}", [self.store.folder], self.mirror)
        self.view.show_mirrored(())
        self.triton = FakeTriton(self.view.paths[0])
        for model in models:
            self.triton.load(model, 1)
        self.triton.loads.clear()
        self.keeper = ExplicitKeeper(
            stores=self.stores,
            mirror=self.mirror,
            view=self.view,
            control=self.triton,
            loaded=self.loaded,
            load_timeout_s=5,
        )
        if not self.keeper.is_settled():
            self.keeper.settle()
        self.keeper.tick()


@pytest.fixture
def setup(fake_store: StoreOfFakes, tmp_path: Path) -> Setup:
    return Setup(fake_store, tmp_path)


def test_nothing_is_done_where_nothing_failed(setup: Setup) -> None:
    setup.store.add("m", 1)
    setup.store.add("never", 1)
    setup.start("m")
    assert setup.triton.loads == []
    assert setup.loaded.versions == {"m": (1,)}


def test_at_the_start_an_older_version_takes_over(setup: Setup) -> None:
    setup.store.add("m", 1)
    setup.store.add("m", 2, "bad")
    setup.start("m")
    assert setup.triton.serving("m") == [1]
    assert setup.triton.ready
    assert sorted(path.name for path in (setup.view.paths[0] / "m").iterdir()) == ["1", "2"]


def test_a_model_without_a_good_version_keeps_readiness_down(setup: Setup) -> None:
    setup.store.add("m", 1, "bad")
    setup.store.add("good", 1)
    setup.start("m", "good")
    assert not setup.triton.ready
    assert setup.triton.serving("good") == [1]
    setup.store.add("m", 2)
    assert setup.triton.load("m", 1) == ""
    setup.keeper.tick()
    assert setup.triton.ready


@pytest.mark.parametrize("serving", [True, False])
def test_a_load_that_failed_is_forgotten(setup: Setup, serving: bool, logged: list[str]) -> None:
    setup.store.add("m", 1, "good" if serving else "bad")
    setup.start(*(["m"] if serving else []))
    setup.store.add("m", 2, "bad")
    assert "cannot serve" in setup.triton.load("m", 1)
    assert not setup.triton.ready
    setup.keeper.tick()
    assert setup.triton.ready
    assert setup.triton.serving("m") == ([1] if serving else [])
    assert any("m version 2 could not be loaded: cannot serve" in message for message in logged)
    assert "cannot serve" in setup.triton.load("m", 1)  # the user asks again, and gets the reason again


def test_after_a_crash_the_same_models_are_loaded(setup: Setup) -> None:
    setup.store.add("m", 1)
    setup.store.add("n", 1)
    setup.start("m")
    setup.triton.load("n", 1)
    setup.keeper.tick()
    setup.store.add("m", 2, "bad")
    typed = ["--load-model=m", "--load-model", "x", "--log-info=true"]
    assert setup.loaded.arguments(typed) == ["--log-info=true", "--load-model=m", "--load-model=n"]
    for _ in range(2):
        setup.start("m", "n")
        assert (setup.triton.serving("m"), setup.triton.serving("n")) == ([1], [1])
        assert setup.triton.ready


def test_a_model_that_was_unloaded_is_not_loaded_again(setup: Setup) -> None:
    setup.store.add("m", 1)
    setup.start("m")
    setup.triton.unload("m")
    setup.keeper.tick()
    assert setup.loaded.arguments(["--load-model=m"]) == []


def test_the_first_start_is_as_the_user_typed() -> None:
    assert LoadedModels().arguments(["--load-model=m"]) == ["--load-model=m"]


def test_every_model_is_what_the_stores_hold() -> None:
    """Triton would take every folder of a store for one, and start twice for those that are none."""
    for typed in (["--load-model=*"], ["--load-model", "*"]):
        assert LoadedModels().arguments(["--log-info=true", *typed], ["a", "b"]) == [
            "--log-info=true",
            "--load-model=a",
            "--load-model=b",
        ]
    for typed in (["--load-model=a"], ["--load-model=*", "--load-model=a"], []):  # the second is Triton's to refuse
        assert LoadedModels().arguments(typed, ["a", "b"]) == typed
    assert LoadedModels({"b": (1,)}).arguments(["--load-model=*"], ["a", "b"]) == ["--load-model=b"]


def test_what_is_known_to_be_bad_is_named_and_not_tried(fake_store: StoreOfFakes, logged: list[str]) -> None:
    fake_store.add("m", 1)
    fake_store.add("odd", 1)
    fake_store.add("odd", 2)
    (fake_store.folder / "broken").mkdir()
    (fake_store.folder / "broken" / "config.pbtxt").touch()
    os.mkfifo(fake_store.folder / "odd" / "2" / "pipe")
    found = ManagedStores([fake_store.folder]).scan()
    assert may_all_load(["--load-model=m", "--load-model", "odd"], found)
    assert logged == []
    assert not may_all_load(["--load-model=m", "--load-model=broken"], found)
    assert not may_all_load(["--load-model=m", "--load-model=nowhere"], found)
    assert not may_all_load(["--log-info=true"], found)
    os.mkfifo(fake_store.folder / "odd" / "1" / "pipe")
    assert not may_all_load(["--load-model=odd"], ManagedStores([fake_store.folder]).scan())
    assert [line.partition(" is not loaded: ")[0] for line in logged] == ["broken", "nowhere", "odd"]
    assert "has no version folder: make broken/1" in logged[0]
    assert "no store holds such a model" in logged[1]
    assert "neither a file nor a folder" in logged[2]
