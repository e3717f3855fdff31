"""The versions that a running server serves: what comes, changes, fails and goes while it runs."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zoo
from fake_repository import FakeTriton, StoreOfFakes
from waiting import wait_until

from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ModelConfigProto
from graphkiln_backend.server import version_control as module
from graphkiln_backend.server.admission import Verdict
from graphkiln_backend.server.flags import ControlMode
from graphkiln_backend.server.golden_requests import Answers
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.proofs import ProofBook, ProofState
from graphkiln_backend.server.repository_control import LoadOverride, VersionState
from graphkiln_backend.server.version_control import VersionController
from graphkiln_backend.system.signals import ServerStopping

POLL_S = 60.0
Result = TypeVar("Result")


def mode(name: str) -> ControlMode:
    return ControlMode(name=name, poll_s=POLL_S, managed=name != "explicit", completes=True)


def settle(controller: VersionController) -> None:
    """Polls until nothing changes any more."""
    while controller.step() != POLL_S:
        pass


class Setup:
    """A server that serves a store, and a controller beside it."""

    def __init__(self, store: StoreOfFakes, folder: Path, name: str = "poll") -> None:
        self.store = store
        self.mirror = Mirror(folder / "overlay")
        self.stores = ManagedStores([store.folder])
        self.stores.open(self.mirror, frozenset(), None)
        self.triton = FakeTriton(self.mirror.path)
        self.triton.start()
        self.admitted: list[tuple[str, int]] = []
        self.controller = VersionController(
            mode=mode(name),
            stores=self.stores,
            mirror=self.mirror,
            control=self.triton,
            instances=folder,
            admit=self._admit,
            load_timeout_s=5.0,
        )

    def _admit(self, model: ShownModel, version: int, _: Callable[[], bool]) -> Verdict:
        self.admitted.append((model.stored.name, version))
        graph = (model.stored.folder / str(version) / "model.onnx").read_text()
        return Verdict("it is bad" if graph == "bad" else "")

    def settle(self) -> None:
        settle(self.controller)


class TestSettling:
    """After the start: older versions in the place of those that failed, and readiness that comes back."""

    def test_nothing_is_loaded_where_nothing_failed(self, fake_store: StoreOfFakes, tmp_path: Path) -> None:
        fake_store.add("m", 1)
        setup = Setup(fake_store, tmp_path, "none")
        assert setup.controller.is_settled()
        setup.controller.settle()
        assert setup.triton.loads == []
        fake_store.add("m", 2)
        assert setup.controller.step() is None  # the stores are not polled
        assert setup.triton.loads == []

    def test_the_newest_good_version_serves_and_readiness_comes_back(
        self, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        fake_store.add("good", 1)
        for version, graph in ((1, "good"), (2, "good"), (3, "bad"), (4, "bad")):
            fake_store.add("m", version, graph)
        setup = Setup(fake_store, tmp_path, "none")
        assert not setup.controller.is_settled()
        setup.controller.settle()
        assert setup.triton.serving("m") == [2]
        assert setup.triton.ready
        assert set(setup.triton.loads) == {"m"}
        refusals = setup.stores.refusals()
        assert list(refusals) == [("m", "3"), ("m", "4")]
        assert refusals["m", "4"] == f"cannot serve {fake_store.folder / 'm' / '4' / 'model.onnx'}"
        assert [path.name for path in (setup.mirror.path / "m").iterdir() if path.name.isdecimal()] == ["2"]

    def test_of_several_versions_the_good_ones_serve(self, fake_store: StoreOfFakes, tmp_path: Path) -> None:
        for version, graph in ((1, "good"), (2, "bad"), (3, "good")):
            fake_store.add("m", version, graph, "version_policy { all { } }")
        setup = Setup(fake_store, tmp_path)
        setup.controller.settle()
        assert setup.triton.serving("m") == [1, 3]
        assert setup.triton.ready

    def test_a_model_without_a_good_version_keeps_readiness_down_until_it_is_gone(
        self, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        fake_store.add("good", 1)
        for version in (1, 2):
            fake_store.add("m", version, "bad")
        setup = Setup(fake_store, tmp_path)
        setup.controller.settle()
        assert not setup.triton.ready
        assert setup.triton.serving("good") == [1]
        shutil.rmtree(fake_store.folder / "m")
        setup.settle()
        assert setup.triton.ready
        assert not (setup.mirror.path / "m").exists()

    def test_what_triton_does_not_even_read_is_refused_with_a_reason(
        self, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        fake_store.add("m", 1)
        setup = Setup(fake_store, tmp_path)
        setup.triton._states.clear()
        setup.controller.settle()
        assert "see its message above" in setup.stores.refusals()["m", "1"]
        assert not setup.triton.ready

    def test_a_load_without_a_response_is_sent_again(
        self, fake_store: StoreOfFakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake_store.add("m", 1)
        fake_store.add("m", 2, "bad")
        setup = Setup(fake_store, tmp_path, "none")
        with monkeypatch.context() as patch:
            patch.setattr(setup.triton, "load", fail)
            with pytest.raises(ConnectionError):
                setup.controller.settle()
        setup.controller.settle()
        assert setup.triton.serving("m") == [1]

    def test_what_is_loaded_meanwhile_is_not_unloaded(self, fake_store: StoreOfFakes, tmp_path: Path) -> None:
        fake_store.add("m", 1, "bad")
        setup = Setup(fake_store, tmp_path)
        fake_store.add("m", 2)
        setup.mirror.show(fake_store.folder / "m", [2], None)
        load = setup.triton.load

        def load_both(model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
            return load(model, timeout_s, override) or load(model, timeout_s)  # the second one has waited

        setup.triton.load = load_both  # type: ignore[method-assign]
        setup.stores.shown.clear()
        setup.controller.settle()
        assert setup.triton.serving("m") == [2]
        assert setup.triton.ready


@pytest.fixture
def setup(fake_store: StoreOfFakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """In poll mode."""
    fake_store.add("m", 1, config="")
    fake_store.add("n", 1, config="")
    monkeypatch.setattr(
        ManagedStores,
        "_complete",
        lambda _, stored, versions: ShownModel(stored=stored, versions=versions, config=ModelConfigProto()),
    )
    setup = Setup(fake_store, tmp_path)
    setup.settle()
    return setup


class TestPolling:
    def test_nothing_is_done_where_nothing_changed(self, setup: Setup) -> None:
        setup.settle()
        assert (setup.admitted, setup.triton.loads) == ([], [])

    def test_a_new_version_is_admitted_and_then_loaded(self, setup: Setup) -> None:
        setup.store.add("m", 2)
        setup.settle()
        assert setup.admitted == [("m", 2)]
        assert setup.triton.serving("m") == [2]
        assert setup.triton.ready

    def test_a_bad_version_never_reaches_the_server(self, setup: Setup) -> None:
        setup.store.add("m", 2, "bad")
        setup.settle()
        setup.settle()
        assert setup.admitted == [("m", 2)]
        assert setup.triton.loads == []
        assert setup.triton.serving("m") == [1]
        setup.store.add("m", 2, "mended")
        setup.settle()
        assert setup.triton.serving("m") == [2]

    def test_a_bad_new_model_takes_no_readiness_away(self, setup: Setup) -> None:
        setup.store.add("late", 1, "bad")
        setup.settle()
        assert setup.triton.ready
        assert "late" not in setup.stores.shown
        setup.store.add("late", 2)
        setup.settle()
        assert setup.triton.serving("late") == [2]

    def test_a_folder_that_is_still_being_written_waits(self, setup: Setup) -> None:
        for written in ("a", "ab", "abc"):
            setup.store.add("m", 2, written)
            assert setup.controller.step() == 1.0
            assert setup.admitted == []
        assert setup.controller.step() == POLL_S
        assert setup.admitted == [("m", 2)]

    def test_a_version_that_is_replaced_in_place_is_loaded_again(self, setup: Setup) -> None:
        setup.store.add("m", 1, "another")
        setup.settle()
        assert setup.admitted == [("m", 1)]
        assert setup.triton.loads == ["m"]

    def test_bad_files_in_place_of_good_ones_change_nothing(self, setup: Setup) -> None:
        setup.store.add("m", 1, "bad")
        setup.settle()
        assert setup.triton.loads == []
        assert setup.triton.serving("m") == [1]

    def test_a_good_version_follows_one_whose_files_were_replaced_by_bad_ones(self, setup: Setup) -> None:
        setup.store.add("m", 2)
        setup.settle()
        setup.store.add("m", 2, "bad")
        setup.settle()
        setup.settle()
        assert setup.triton.serving("m") == [2]
        assert setup.admitted == [("m", 2)] * 2, "the older version is not proven while it is not needed"
        setup.store.add("m", 3)
        setup.settle()
        setup.settle()
        assert setup.triton.serving("m") == [3]
        assert setup.admitted == [("m", 2)] * 2 + [("m", 3)]

    def test_a_load_without_a_response_is_sent_again(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        setup.store.add("m", 2)
        with monkeypatch.context() as patch:
            patch.setattr(setup.triton, "load", fail)
            with pytest.raises(ConnectionError):
                setup.settle()
        setup.settle()
        assert setup.triton.serving("m") == [2]
        assert setup.admitted == [("m", 2)]

    def test_an_unload_without_a_response_is_sent_again(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.rmtree(setup.store.folder / "m")
        with monkeypatch.context() as patch:
            patch.setattr(setup.triton, "unload", fail)
            with pytest.raises(ConnectionError):
                setup.settle()
        setup.settle()
        assert setup.triton.serving("m") == []
        assert "m" not in setup.stores.shown

    @pytest.mark.parametrize("config", ["hello {", "version_policy { specific { versions: 9 } }"])
    def test_a_bad_configuration_changes_nothing(self, setup: Setup, config: str) -> None:
        (setup.store.folder / "m" / "config.pbtxt").write_text(config)
        setup.settle()
        assert setup.triton.loads == []
        assert setup.triton.serving("m") == [1]

    def test_another_configuration_is_admitted_for_every_version(self, setup: Setup) -> None:
        setup.store.add("m", 2, config="version_policy { all { } }")
        setup.settle()
        assert sorted(setup.admitted) == [("m", 1), ("m", 2)]

    def test_a_version_that_is_removed_gives_way_to_an_admitted_one(self, setup: Setup) -> None:
        setup.store.add("m", 2)
        setup.settle()
        shutil.rmtree(setup.store.folder / "m" / "2")
        setup.settle()
        assert setup.admitted == [("m", 2), ("m", 1)]
        assert setup.triton.serving("m") == [1]

    @pytest.mark.parametrize("remove", [shutil.rmtree, lambda model: shutil.rmtree(model / "1")])
    def test_a_model_that_is_removed_is_unloaded(self, setup: Setup, remove: Callable[[Path], None]) -> None:
        remove(setup.store.folder / "m")
        setup.settle()
        assert setup.triton.serving("m") == []
        assert setup.triton.serving("n") == [1]
        assert setup.triton.ready

    def test_an_admitted_version_that_fails_in_the_server_gives_way(self, setup: Setup) -> None:
        setup.store.add("m", 2, "bad in the server only")
        setup.settle()
        assert setup.triton.serving("m") == [1]
        assert setup.triton.ready

    def test_a_model_in_two_stores_keeps_serving(self, setup: Setup, tmp_path: Path) -> None:
        second = StoreOfFakes(tmp_path / "second")
        setup.stores.stores = [setup.store.folder, second.folder]
        setup.settle()
        second.add("m", 5)
        setup.settle()
        assert setup.triton.serving("m") == [1]

    def test_an_empty_folder_becomes_a_model(self, setup: Setup) -> None:
        (setup.store.folder / "new").mkdir()
        setup.settle()
        setup.store.add("new", 1, config="")
        setup.settle()
        assert setup.triton.serving("new") == [1]

    def test_a_folder_that_comes_as_a_broken_model_is_logged_once(self, setup: Setup, logged: list[str]) -> None:
        (setup.store.folder / "wrong").mkdir()
        (setup.store.folder / "wrong" / "model.onnx").write_text("good")
        for _ in range(2):
            setup.settle()
        (line,) = [line for line in logged if "wrong" in line]
        assert line.endswith("make wrong/1")
        assert setup.triton.ready


class TestUnreadableStores:
    """Stores and folders that are there and fail take nothing away: bad blocks, a network file system, rights."""

    def test_a_store_that_is_gone_is_not_empty(self, setup: Setup, logged: list[str]) -> None:
        setup.store.folder.rename(setup.store.folder.with_name("away"))
        for _ in range(3):
            setup.controller.step()
        assert setup.triton.serving("m") == [1]
        assert sum("loaded models keep serving" in message for message in logged) == 1
        setup.store.folder.with_name("away").rename(setup.store.folder)
        setup.settle()
        assert setup.triton.loads == []

    def test_another_file_system_is_not_an_empty_store(self, setup: Setup, logged: list[str]) -> None:
        setup.controller._devices = {setup.store.folder: -1}
        shutil.rmtree(setup.store.folder / "m")
        setup.controller.step()
        setup.controller.step()
        assert setup.triton.serving("m") == [1]
        assert "another file system" in logged[-1]

    @pytest.mark.parametrize(("inside", "number"), [(".", errno.EIO), ("m", errno.EACCES), ("m/1", errno.ESTALE)])
    def test_a_folder_that_cannot_be_listed_is_taken_up_when_it_is_back(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str], inside: str, number: int
    ) -> None:
        failing, iterdir = {setup.store.folder / inside}, Path.iterdir

        def fail(path: Path) -> Iterator[Path]:
            if path in failing:
                raise OSError(number, os.strerror(number))
            return iterdir(path)

        monkeypatch.setattr(Path, "iterdir", fail)
        for _ in range(3):
            setup.settle()
        assert (setup.triton.serving("m"), setup.triton.serving("n")) == ([1], [1])
        assert setup.triton.loads == []
        assert len([line for line in logged if "keep serving" in line and os.strerror(number) in line]) == 1
        assert not any("not served" in line for line in logged)
        setup.store.add("m", 2)
        failing.clear()
        setup.settle()
        assert setup.triton.serving("m") == [2]

    def test_a_model_that_is_replaced_by_renaming_is_not_unloaded(self, setup: Setup, tmp_path: Path) -> None:
        folder = setup.store.folder / "m"
        folder.rename(tmp_path / "away")
        assert setup.controller.step() == 1.0, "another look should follow soon"
        (tmp_path / "away").rename(folder)
        setup.settle()
        assert setup.triton.serving("m") == [1]
        assert setup.triton.loads == []

    @pytest.mark.parametrize("link", ["store", "model"])
    def test_a_link_that_is_swapped_is_followed(self, setup: Setup, tmp_path: Path, link: str) -> None:
        """As git-sync and Kubernetes' ConfigMaps do."""
        place = setup.store.folder if link == "store" else setup.store.folder / "m"
        before = tmp_path / "revisions" / "a"
        before.parent.mkdir()
        place.rename(before)
        place.symlink_to(before)
        setup.settle()
        assert setup.triton.serving("m") == [1]
        after = before.with_name("b")
        shutil.copytree(before, after)
        model = after / "m" if link == "store" else after
        shutil.copytree(model / "1", model / "2")
        new = tmp_path / "new"
        new.symlink_to(after)
        new.replace(place)
        shutil.rmtree(before)
        setup.settle()
        assert (setup.triton.serving("m"), setup.triton.serving("n")) == ([2], [1])

    def test_a_link_that_leads_nowhere_for_a_while(self, setup: Setup, tmp_path: Path, logged: list[str]) -> None:
        place, disk = setup.store.folder / "m", tmp_path / "disk"
        place.rename(disk)
        place.symlink_to(disk)
        setup.settle()
        disk.rename(tmp_path / "away")
        for _ in range(3):
            setup.settle()
        assert setup.triton.serving("m") == [1]
        assert len([line for line in logged if "leads nowhere" in line]) == 1
        place.unlink()
        setup.settle()
        assert setup.triton.serving("m") == []


class TestAnotherSignature:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)))
        return tmp_path / "store"

    @pytest.fixture
    def stores(self, store: Path) -> ManagedStores:
        return ManagedStores([store])

    @pytest.fixture
    def controller(self, stores: ManagedStores, tmp_path: Path) -> VersionController:
        mirror = Mirror(tmp_path / "overlay")
        stores.open(mirror, frozenset({BACKEND, DROP_IN_BACKEND}), lambda folder: folder)
        triton = FakeTriton(mirror.path)
        triton.start()
        controller = VersionController(
            mode=mode("poll"),
            stores=stores,
            mirror=mirror,
            control=triton,
            instances=tmp_path,
            admit=lambda *_: Verdict(""),
            load_timeout_s=5,
        )
        settle(controller)
        return controller

    def test_a_version_with_it_is_refused_with_the_way_out(
        self, controller: VersionController, stores: ManagedStores, store: Path, logged: list[str]
    ) -> None:
        zoo.add(store, "m", zoo.scale(("batch", 4)), version=2)
        settle(controller)
        settle(controller)
        (refused,) = [line for line in logged if "version 2 is not served" in line]
        assert "output 'y' is FP32 [4], not FP32 [3]" in refused
        assert "--name" in refused
        assert stores.shown["m"].versions == (1,)
        assert "signature" in stores.refusals()["m", "2"]
        zoo.add(store, "m", zoo.scale(("batch", 3), 5), version=3)
        settle(controller)
        assert stores.shown["m"].versions == (3,)

    def test_it_is_served_when_the_others_are_gone(
        self, controller: VersionController, stores: ManagedStores, store: Path
    ) -> None:
        zoo.add(store, "m", zoo.scale(("batch", 4)), version=2)
        settle(controller)
        shutil.rmtree(store / "m" / "1")
        settle(controller)
        assert stores.shown["m"].versions == (2,)
        assert stores.refusals() == {}

    def test_files_in_place_are_no_way_around(
        self, controller: VersionController, stores: ManagedStores, store: Path
    ) -> None:
        served = stores.shown["m"]
        shutil.rmtree(store / "m" / "1")
        zoo.add(store, "m", zoo.scale(("batch", 4)))
        settle(controller)
        assert stores.shown["m"] is served

    def test_a_configuration_for_what_serves_is_taken(
        self, controller: VersionController, stores: ManagedStores, store: Path
    ) -> None:
        text = 'input { name: "x" dims: [2, 3] } output { name: "y" dims: [2, 3] } max_batch_size: 0'
        (store / "m" / "config.pbtxt").write_text(text)
        settle(controller)
        config = stores.shown["m"].config
        assert config is not None
        assert config.input[0].dims == [2, 3]


class ExplicitSetup:
    """A server in the user's explicit mode."""

    def __init__(self, store: StoreOfFakes, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.stores = ManagedStores([store.folder])
        self.loaded: list[str] = []
        self.starts = 0

    def start(self, *models: str) -> None:
        """Starts a server which loads some models."""
        self.starts += 1
        self.triton = FakeTriton(self.store.folder)
        for model in models:
            self.triton.load(model, 1)
        self.triton.loads.clear()
        self.controller = VersionController(
            mode=mode("explicit"),
            stores=self.stores,
            mirror=Mirror(self.folder / f"overlay {self.starts}"),
            control=self.triton,
            instances=self.folder,
            admit=lambda *_: Verdict("never asked"),
            load_timeout_s=5,
            on_loaded=lambda names: self.loaded.__setitem__(slice(None), names),
        )
        if not self.controller.is_settled():
            self.controller.settle()
        self.controller.step()


class HastyUser:
    """A user of explicit mode with a virtual clock, who checks after each call that what was loaded serves.

    Attributes:
        acts: Time in seconds and name of what is still to be done, in order.
        served: Checks of a serving model.
    """

    def __init__(self, store: StoreOfFakes, triton: FakeTriton, chance: random.Random) -> None:
        self.store, self.triton, self.chance = store, triton, chance
        self.now_s = self.served = 0.0
        self.acts: list[tuple[float, str, int]] = []
        self.expected: dict[tuple[str, int], str] = {}
        at_s = 0.0
        for number in range(20):
            at_s += chance.choice([0.0, 0.3, 1.0, 10.0]) * chance.random()
            self.acts.append((at_s, chance.choice(["break", "mend", "load", "load", "load", "unload", "add"]), number))
        store.add("m", 1, "good 0", "")
        self.acts.append((at_s, "mend", 99))
        self.acts.append((at_s, "load", 99))

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and act meanwhile."""
        self.now_s += seconds
        while self.acts and self.acts[0][0] <= self.now_s:
            _, verb, number = self.acts.pop(0)
            newest = max(int(path.name) for path in (self.store.folder / "m").iterdir() if path.name.isdecimal())
            if verb == "load":
                if not self.triton.load("m", 1):
                    self.expected = {("m", newest): (self.store.folder / "m" / str(newest) / "model.onnx").read_text()}
            elif verb == "unload":
                self.triton.unload("m")
                self.expected = {}
            else:
                kind = "bad" if verb == "break" else "good"
                self.store.add("m", newest + (verb == "add"), f"{kind} {number}")
            self.check()

    def check(self) -> None:
        assert self.triton.graphs == self.expected
        self.served += bool(self.expected)


class SlowControl:
    """Calls of the controller take time before and after their effect; a user acts meanwhile, as on a busy machine."""

    def __init__(self, triton: FakeTriton, user: HastyUser) -> None:
        self._triton, self._user = triton, user

    def index(self) -> list[VersionState]:
        return self._slowly(self._triton.index)

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        return self._slowly(lambda: self._triton.load(model, timeout_s, override))

    def unload(self, model: str) -> None:
        self._slowly(lambda: self._triton.unload(model))

    def _slowly(self, call: Callable[[], Result]) -> Result:
        longest_s = self._user.chance.choice([0.01, 3.0])
        self._user.pass_s(longest_s * self._user.chance.random())
        result = call()
        self._user.check()
        self._user.pass_s(longest_s * self._user.chance.random())
        return result


class TestExplicitMode:
    @pytest.fixture
    def setup(self, fake_store: StoreOfFakes, tmp_path: Path) -> ExplicitSetup:
        return ExplicitSetup(fake_store, tmp_path)

    def test_nothing_is_done_where_nothing_failed(self, setup: ExplicitSetup) -> None:
        setup.store.add("m", 1)
        setup.store.add("never", 1)
        setup.start("m")
        assert setup.triton.loads == []
        assert setup.loaded == ["m"]
        setup.triton.unload("m")
        setup.controller.step()
        assert setup.loaded == []

    def test_at_the_start_an_older_version_takes_over(self, setup: ExplicitSetup) -> None:
        setup.store.add("m", 1)
        setup.store.add("m", 2, "bad")
        setup.start("m")
        assert setup.triton.serving("m") == [1]
        assert setup.triton.ready

    def test_a_model_without_a_good_version_keeps_readiness_down(self, setup: ExplicitSetup) -> None:
        setup.store.add("m", 1, "bad")
        setup.store.add("good", 1)
        setup.start("m", "good")
        assert not setup.triton.ready
        assert setup.triton.serving("good") == [1]
        setup.store.add("m", 2)
        assert setup.triton.load("m", 1) == ""
        setup.controller.step()
        assert setup.triton.ready

    @pytest.mark.parametrize("serving", [True, False])
    def test_a_failed_load_is_logged_once_and_forgotten_where_nothing_can_be_taken_away(
        self, setup: ExplicitSetup, serving: bool, logged: list[str]
    ) -> None:
        setup.store.add("m", 1, "good" if serving else "bad")
        setup.start(*(["m"] if serving else []))
        setup.store.add("m", 2, "bad")
        assert "cannot serve" in setup.triton.load("m", 1)
        assert not setup.triton.ready
        setup.controller.step()
        setup.controller.step()
        assert setup.triton.ready == serving
        assert setup.triton.loads == ["m"] * (2 if serving else 1)
        assert setup.triton.serving("m") == ([1] if serving else [])
        assert sum("m version 2 could not be loaded: cannot serve" in message for message in logged) == 1
        assert "cannot serve" in setup.triton.load("m", 1)  # the user asks again, and gets the reason again

    @pytest.mark.parametrize("strict", [True, False])
    def test_only_the_user_takes_a_model_away(self, tmp_path: Path, strict: bool) -> None:
        """A user breaks, mends, loads and unloads at any time, also while the controller waits for Triton."""
        for seed in range(250):
            store = StoreOfFakes(tmp_path / str(seed))
            triton = FakeTriton(store.folder)
            user = HastyUser(store, triton, random.Random(seed))
            control: Any = SlowControl(triton, user)
            controller = VersionController(
                mode=mode("explicit"),
                stores=ManagedStores([store.folder]),
                mirror=Mirror(tmp_path / "overlay"),
                control=control,
                instances=tmp_path,
                admit=lambda *_: Verdict("never asked"),
                load_timeout_s=5,
                strict=strict,
            )
            controller.is_settled()
            while user.acts:
                user.pass_s(controller.step() or 0.0)
            assert user.served > 0, seed

    def test_after_a_crash_what_was_added_and_is_bad_changes_nothing(self, setup: ExplicitSetup) -> None:
        setup.store.add("m", 1)
        setup.start("m")
        setup.store.add("m", 2, "bad")
        for _ in range(2):
            setup.start("m")
            assert setup.triton.serving("m") == [1]
            assert setup.triton.ready


class FakeProofs:
    """Proofs through a server, with the verdicts of a test.

    Attributes:
        refused: Reasons before a version is shown.
        wrong: Reasons on the serving server.
        admitted: The versions that were proven.
        asked: The versions of each replay.
        meanwhile: Called during a proof or a replay.
        answered: Requests that each version has answered since it was loaded.
    """

    def __init__(self) -> None:
        self.book = ProofBook()
        self.answered: Counter[tuple[str, int]] = Counter()
        self.counters: dict[str, int] = {}  # others
        self.refused: dict[tuple[str, int], str] = {}
        self.wrong: dict[tuple[str, int], str] = {}
        self.admitted: list[tuple[str, int]] = []
        self.asked: list[list[tuple[str, int]]] = []
        self.first: list[object] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def admit(self, models: list[tuple[ShownModel, int]], _: Callable[[], bool]) -> dict[tuple[str, int], Answers]:
        self.meanwhile()
        names = [(model.stored.name, version) for model, version in models]
        self.admitted += names
        return {which: Answers(reason=self.refused.get(which, "")) for which in names}

    def replay(
        self, models: list[ShownModel], _: Callable[[], bool], *, idle_s: float = 0.0, asking: object = None
    ) -> dict[tuple[str, int], str]:
        assert idle_s >= 0
        self.meanwhile()
        asked = [(model.stored.name, version) for model in models for version in model.provable]
        self.first.append(asking)
        if asked:
            self.asked.append(asked)
        return {which: reason for which, reason in self.wrong.items() if which in asked}

    def note(self, model: ShownModel) -> None:
        self.book.keep(model.stored.name, model.versions)

    def read_counters(self, models: Iterable[ShownModel]) -> dict[tuple[str, int], dict[str, int]]:
        names = [(model.stored.name, version) for model in models for version in model.provable]
        return {which: {"requests": self.answered[which], **self.counters} for which in names}


OTHER = 'backend: "python"'


class ProvenSetup:
    """A server of versions of another backend, all with golden samples."""

    def __init__(self, store: StoreOfFakes, folder: Path, name: str) -> None:
        self.store, self.folder, self.name = store, folder, name
        self.proofs = FakeProofs()
        self.stores = ManagedStores([store.folder], backends=frozenset({BACKEND}))
        self.starts = 0

    def add(self, model: str, version: int, graph: str = "good") -> None:
        is_new = not (self.store.folder / model).exists()
        folder = self.store.add(model, version, graph, OTHER if is_new else None)
        for file in ("manifest.json", "golden.npz"):
            (folder / file).write_text("")

    def start(self, *models: str, first_replay: Any = None) -> None:
        """Start a server; in explicit mode it loads some models."""
        self.starts += 1
        mirror = Mirror(self.folder / f"overlay {self.starts}")
        explicit = self.name == "explicit"
        if not explicit:
            self.stores.open(mirror, frozenset({BACKEND}), None)
        self.triton = FakeTriton(self.store.folder if explicit else mirror.path)
        if explicit:
            for model in models:
                self.triton.load(model, 1)
            self.triton.loads.clear()
        else:
            self.triton.start()
        proofs: Any = self.proofs
        self.controller = VersionController(
            mode=mode(self.name),
            stores=self.stores,
            mirror=mirror,
            control=self.triton,
            instances=self.folder,
            admit=lambda *_: Verdict("never asked"),
            load_timeout_s=5,
            proofs=proofs,
            first_replay=first_replay,
            replay_interval_s=0.01,
        )

    def settle(self) -> None:
        """As the controller does once the server is live."""
        if not self.controller.is_settled():
            self.controller.settle()
        self.follow()

    def follow(self) -> None:
        """Step until nothing changes any more."""
        while self.controller.step() not in {POLL_S, module._EXPLICIT_S, None}:
            pass


class TestProofsThroughTheServer:
    @pytest.fixture
    def setup(self, fake_store: StoreOfFakes, tmp_path: Path) -> ProvenSetup:
        return ProvenSetup(fake_store, tmp_path, "poll")

    @pytest.fixture
    def explicit(self, fake_store: StoreOfFakes, tmp_path: Path) -> ProvenSetup:
        return ProvenSetup(fake_store, tmp_path, "explicit")

    def test_after_the_start_every_version_is_asked_before_the_report(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.add("n", 1)
        first = object()
        setup.start(first_replay=first)
        assert not setup.controller.is_settled()
        setup.settle()
        assert [sorted(asked) for asked in setup.proofs.asked] == [[("m", 1), ("n", 1)]]
        assert setup.proofs.first == [first]
        assert setup.controller.fault == ""

    def test_one_that_is_wrong_there_gives_way(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.add("m", 2)
        setup.proofs.wrong = {("m", 2): "the outputs changed"}
        setup.start()
        setup.settle()
        assert setup.triton.serving("m") == [1]
        assert setup.proofs.asked == [[("m", 2)], [("m", 1)]]
        assert setup.stores.refusals() == {("m", "2"): "the outputs changed"}

    def test_if_all_are_wrong_none_serves(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.proofs.wrong = {("m", 1): "the outputs changed"}
        setup.start()
        setup.settle()
        assert setup.triton.serving("m") == []
        assert not setup.triton.ready

    def test_versions_without_samples_are_not_asked(self, setup: ProvenSetup, fake_store: StoreOfFakes) -> None:
        fake_store.add("bare", 1, config=OTHER)
        setup.start()
        setup.settle()
        fake_store.add("bare", 2)
        setup.follow()
        assert setup.triton.serving("bare") == [2]
        assert (setup.proofs.asked, setup.proofs.admitted) == ([], [])

    def test_a_new_version_is_proven_loaded_and_asked(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.start()
        setup.settle()
        setup.proofs.asked.clear()
        setup.add("m", 2)
        setup.follow()
        assert setup.proofs.admitted == [("m", 2)]
        assert setup.triton.serving("m") == [2]
        assert setup.proofs.asked == [[("m", 2)]]

    def test_a_refused_version_never_reaches_the_server(self, setup: ProvenSetup, logged: list[str]) -> None:
        setup.add("m", 1)
        setup.start()
        setup.settle()
        setup.proofs.refused = {("m", 2): "it is wrong"}
        setup.add("m", 2)
        setup.follow()
        setup.follow()
        assert setup.proofs.admitted == [("m", 2)]
        assert setup.triton.loads == []
        assert logged == ["m version 2 is not served: it is wrong"]

    def test_files_that_change_during_the_proof_are_proven_again(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.start()
        setup.settle()
        setup.add("m", 2)
        graphs = iter(["changed", "changed again"])

        def change() -> None:
            if graph := next(graphs, ""):
                setup.store.add("m", 2, graph)

        setup.proofs.meanwhile = change
        setup.follow()
        assert setup.proofs.admitted == [("m", 2)] * 3
        assert setup.triton.serving("m") == [2]

    def test_one_that_goes_during_the_proof(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.start()
        setup.settle()
        setup.add("m", 2)
        setup.proofs.meanwhile = lambda: shutil.rmtree(setup.store.folder / "m" / "2", ignore_errors=True)
        setup.follow()
        assert setup.triton.loads == []
        assert setup.triton.serving("m") == [1]

    def test_a_replay_without_a_verdict_is_repeated(self, setup: ProvenSetup) -> None:
        """The process that asks was killed."""
        setup.add("m", 1)
        setup.start()
        setup.proofs.meanwhile = lambda: fail() and None
        with pytest.raises(ConnectionError):
            setup.settle()
        setup.proofs.meanwhile = lambda: None
        setup.follow()
        setup.follow()
        assert setup.proofs.asked == [[("m", 1)]]

    def test_explicit_mode_unloads_one_without_a_right_version_at_the_start(self, explicit: ProvenSetup) -> None:
        explicit.add("m", 1)
        explicit.proofs.wrong = {("m", 1): "the outputs changed"}
        explicit.start("m")
        explicit.settle()
        assert explicit.triton.serving("m") == []

    def test_a_model_that_is_removed_is_forgotten(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.start()
        setup.settle()
        state = ProofState(model="m", version=1, backend="python", seat="", proven=True)
        setup.proofs.book.record(state)
        shutil.rmtree(setup.store.folder / "m")
        setup.follow()
        assert setup.proofs.book.rows() == ()

    def test_what_turns_wrong_while_it_serves_is_a_fault(self, setup: ProvenSetup) -> None:
        setup.add("m", 1)
        setup.start()
        setup.controller.begin(lambda: None)
        try:
            wait_until(lambda: len(setup.proofs.asked) > 2)
            assert setup.controller.fault == ""
            setup.proofs.wrong = {("m", 1): "the outputs changed"}
            wait_until(lambda: bool(setup.controller.fault))
            assert setup.controller.fault == "m version 1 computes wrong outputs: the outputs changed"
        finally:
            setup.controller.end()

    def test_an_error_of_a_replay_does_not_end_the_others(self, setup: ProvenSetup, logged: list[str]) -> None:
        setup.add("m", 1)
        setup.start()
        errors = iter([OSError("too many open files"), KeyError("unforeseen"), RuntimeError("changed size")])

        def raise_next() -> None:
            if setup.proofs.asked and (error := next(errors, None)):
                raise error

        setup.proofs.meanwhile = raise_next
        setup.controller.begin(lambda: None)
        wait_until(lambda: len(setup.proofs.asked) > 3)
        setup.controller.end()
        assert len([line for line in logged if "cannot control the models" in line]) == 3

    @pytest.mark.parametrize("name", ["poll", "explicit"])
    def test_what_was_replaced_meanwhile_is_no_fault(
        self, name: str, setup: ProvenSetup, explicit: ProvenSetup
    ) -> None:
        setup = {"poll": setup, "explicit": explicit}[name]
        setup.add("m", 1)
        setup.start("m")
        setup.settle()
        setup.proofs.wrong = {("m", 1): "the outputs changed"}
        setup.proofs.meanwhile = lambda: setup.add("m", 1, "other files")
        setup.controller._replay()
        assert setup.controller.fault == ""

    @pytest.mark.parametrize("name", ["poll", "explicit"])
    def test_samples_of_other_files_than_those_that_serve_are_not_asked(
        self, name: str, setup: ProvenSetup, explicit: ProvenSetup
    ) -> None:
        """The user replaces a version in place; before it is loaded, the old one serves."""
        setup = {"poll": setup, "explicit": explicit}[name]
        setup.add("m", 1)
        setup.start("m")
        setup.settle()
        setup.proofs.asked.clear()
        setup.add("m", 1, "other files")
        setup.controller._replay()
        assert setup.proofs.asked == []

    def test_explicit_mode_asks_what_the_user_loads_once(self, explicit: ProvenSetup) -> None:
        for version in (1, 2):
            explicit.add("m", version)
        explicit.start("m")
        explicit.settle()
        explicit.follow()
        assert explicit.proofs.asked == [[("m", 2)]], "at the start"
        explicit.add("late", 1)
        explicit.triton.load("late", 1)
        explicit.follow()
        explicit.follow()
        assert explicit.proofs.asked == [[("m", 2)], [("late", 1)]]

    @pytest.mark.parametrize(
        ("answers", "counters"),
        [(2, {"queue ns": 900}), (9, {"queue ns": 400}), (9, {"batches of 8": 1}), (9, {})],
        ids=["fewer requests", "less time", "other batches", "nothing"],
    )
    def test_explicit_mode_asks_a_version_that_was_replaced_in_place(
        self, explicit: ProvenSetup, answers: int, counters: dict[str, int]
    ) -> None:
        """It may have answered more requests since than the one before in all."""
        explicit.start()
        explicit.settle()
        explicit.add("m", 1)
        explicit.triton.load("m", 1)
        explicit.proofs.answered["m", 1] = 4  # the samples
        explicit.proofs.counters = {"queue ns": 500}
        explicit.follow()
        explicit.proofs.asked.clear()
        explicit.proofs.answered["m", 1] += 1
        explicit.follow()
        assert explicit.proofs.asked == []
        explicit.add("m", 1, "other files")
        explicit.triton.load("m", 1)
        explicit.proofs.answered["m", 1], explicit.proofs.counters = answers, counters
        for _ in range(2):
            explicit.follow()
            assert explicit.proofs.asked == [[("m", 1)]]
        explicit.controller._replay()
        assert explicit.proofs.asked == [[("m", 1)]] * 2, "and from then on it is replayed"

    def test_explicit_mode_restarts_nothing_for_a_version_that_is_taken_back(self, explicit: ProvenSetup) -> None:
        """The replays of what serves go on in another thread."""
        explicit.start()
        explicit.settle()
        explicit.add("m", 1)
        explicit.proofs.wrong = {("m", 1): "the outputs changed"}
        explicit.triton.load("m", 1)

        def replay() -> None:
            explicit.proofs.meanwhile = lambda: None
            explicit.controller._replay()

        explicit.proofs.meanwhile = replay
        explicit.follow()
        assert explicit.controller.fault == ""
        assert explicit.triton.serving("m") == []

    def test_explicit_mode_replaces_a_wrong_version_by_the_older_one(self, explicit: ProvenSetup) -> None:
        explicit.add("m", 1)
        explicit.start("m")
        explicit.settle()
        explicit.add("m", 2)
        explicit.proofs.wrong = {("m", 2): "the outputs changed"}
        explicit.triton.load("m", 1)
        explicit.follow()
        assert explicit.triton.serving("m") == [1]
        explicit.follow()
        assert explicit.proofs.asked[-1] == [("m", 1)]

    def test_explicit_mode_unloads_one_that_has_no_right_version(self, explicit: ProvenSetup) -> None:
        explicit.start()
        explicit.settle()
        explicit.add("m", 1)
        explicit.proofs.wrong = {("m", 1): "the outputs changed"}
        explicit.triton.load("m", 1)
        explicit.follow()
        assert explicit.triton.serving("m") == []

    def test_explicit_mode_replays_what_serves_now(self, explicit: ProvenSetup) -> None:
        for model in ("m", "late"):
            explicit.add(model, 1)
        explicit.start("m")
        explicit.settle()
        explicit.triton.unload("m")
        explicit.triton.load("late", 1)
        explicit.follow()
        explicit.proofs.asked.clear()
        explicit.controller._replay()
        assert explicit.proofs.asked == [[("late", 1)]]

    @pytest.mark.parametrize("name", ["poll", "explicit"])
    def test_after_a_restart_all_are_asked_again(self, name: str, setup: ProvenSetup, explicit: ProvenSetup) -> None:
        setup = {"poll": setup, "explicit": explicit}[name]
        for version in (1, 2):
            setup.add("m", version)
        setup.start("m")
        setup.settle()
        setup.proofs.wrong = {("m", 2): "the outputs changed"}
        setup.proofs.asked.clear()
        setup.start("m")
        setup.settle()
        assert setup.proofs.asked[0] == [("m", 2)]
        assert setup.triton.serving("m") == [1]


class Steps(VersionController):
    """A controller that does what it is given, one after the other; the first step is to settle."""

    def __init__(self, store: Path, *steps: Callable[[], float | None], settled: bool = False, name: str = "poll"):
        mirror = Mirror(store)
        super().__init__(
            mode=mode(name),
            stores=ManagedStores(),
            mirror=mirror,
            control=FakeTriton(mirror.path),
            instances=store,
            admit=lambda *_: Verdict(""),
            load_timeout_s=5,
        )
        self._steps = list(steps)
        self._settled = settled
        self.done = threading.Event()

    def is_settled(self) -> bool:
        return self._settled

    def settle(self) -> None:
        self.step()

    def step(self) -> float | None:
        if not self._steps:
            self.done.set()
            return None
        return self._steps.pop(0)()


def fail(*_: object) -> float | None:
    raise ConnectionError("the server has ended")


class TestThread:
    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SOON_S", 0.01)

    def test_it_settles_reports_and_steps(self, tmp_path: Path) -> None:
        done: list[str] = []
        controller = Steps(tmp_path, lambda: done.append("settle"), lambda: done.append("step") or 0.0)
        controller.begin(lambda: done.append("report"))
        assert controller.done.wait(10)
        controller.end()
        assert done == ["settle", "report", "step"]

    @pytest.mark.parametrize("name", ["none", "poll"])
    def test_where_nothing_failed_it_reports_at_once(self, tmp_path: Path, name: str) -> None:
        controller = Steps(tmp_path, lambda: 0.0, settled=True, name=name)
        reported: list[threading.Thread] = []
        controller.begin(lambda: reported.append(threading.current_thread()))
        assert reported == [threading.current_thread()]
        assert controller.done.wait(10) if name == "poll" else not controller.done.is_set()
        controller.end()

    def test_an_error_is_logged_and_tried_again(self, tmp_path: Path, logged: list[str]) -> None:
        controller = Steps(tmp_path, fail, fail, lambda: None, fail)
        reported = threading.Event()
        controller.begin(reported.set)
        assert reported.wait(10)
        controller.end()
        assert logged
        assert set(logged) == {"cannot control the models, retrying: the server has ended"}

    def test_an_unforeseen_error_does_not_end_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def divide() -> float | None:
            raise ZeroDivisionError("by a graph")

        controller = Steps(tmp_path, lambda: None, divide, divide)
        controller.begin(lambda: None)
        assert controller.done.wait(10)
        controller.end()
        first, second = caplog.records
        assert "ZeroDivisionError: by a graph" in first.message
        assert first.exc_info
        assert not second.exc_info, "its traceback is logged once"

    def test_an_error_after_the_halt_is_not_logged(self, tmp_path: Path, logged: list[str]) -> None:
        def halt() -> float | None:
            controller.halt()
            raise ConnectionError

        reported: list[bool] = []
        controller = Steps(tmp_path, halt)
        controller.begin(lambda: reported.append(True))
        controller.end()
        assert (logged, reported) == ([], [])

    def test_a_stopped_admission_ends_it(self, tmp_path: Path) -> None:
        def stop() -> float | None:
            raise ServerStopping

        controller = Steps(tmp_path, lambda: None, stop, lambda: 0.0)
        controller.begin(lambda: None)
        assert controller._thread is not None
        controller._thread.join(10)
        assert not controller._thread.is_alive()

    def test_a_store_that_does_not_respond_delays_no_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr(module, "_END_S", 0.01)
        asked, responded = threading.Event(), threading.Event()
        later: list[str] = []

        def hang() -> float | None:
            asked.set()
            responded.wait(60)
            return 0.0

        controller = Steps(tmp_path, lambda: None, hang, lambda: later.append("looked again"))
        controller.begin(lambda: None)
        assert asked.wait(10)
        hanging = controller._thread
        controller.end()
        assert logged == ["a model store has not responded for 0.01 s: continuing without it"]
        responded.set()
        assert hanging is not None
        hanging.join(10)
        assert later == []

    def test_a_server_that_lists_nothing_is_reported_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        controller = Steps(tmp_path, name="none")
        monkeypatch.setattr(controller, "is_settled", fail)
        reported: list[bool] = []
        controller.begin(lambda: reported.append(True))
        assert reported == [True]
        assert "the server has ended" in logged[0]
