"""What comes, changes and goes in the stores while a server runs."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zoo
from fake_repository import FakeTriton, StoreOfFakes

from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ModelConfigProto
from graphkiln_backend.server.admission import Verdict
from graphkiln_backend.server.managed_stores import ManagedStores, ServedModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.polling import Poller


class Setup:
    """A server that serves a store, and a poller beside it."""

    def __init__(self, store: StoreOfFakes, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.mirror = mirror
        self.stores = ManagedStores([store.folder])
        monkeypatch.setattr(ManagedStores, "_complete", lambda *_: ModelConfigProto())
        self.stores.open(mirror, frozenset(), None)
        self.triton = FakeTriton(mirror.path)
        self.triton.start()
        self.admitted: list[tuple[str, int]] = []
        self.poller = Poller(self.stores, mirror, self.triton, self._admit, 5.0)
        self.settle()

    def _admit(self, model: ServedModel, version: int) -> Verdict:
        self.admitted.append((model.stored.name, version))
        graph = (model.stored.folder / str(version) / "model.onnx").read_text()
        return Verdict("it is bad" if graph == "bad" else "")

    def settle(self) -> None:
        settle(self.poller)


def settle(poller: Poller) -> None:
    """Polls until nothing changes any more."""
    while poller.poll():
        pass


@pytest.fixture
def setup(fake_store: StoreOfFakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    fake_store.add("m", 1, config="")
    fake_store.add("n", 1, config="")
    return Setup(fake_store, Mirror(tmp_path / "overlay"), monkeypatch)


def test_nothing_is_done_where_nothing_changed(setup: Setup) -> None:
    setup.settle()
    assert (setup.admitted, setup.triton.loads) == ([], [])


def test_a_new_version_is_admitted_and_then_loaded(setup: Setup) -> None:
    setup.store.add("m", 2)
    setup.settle()
    assert setup.admitted == [("m", 2)]
    assert setup.triton.serving("m") == [2]
    assert setup.triton.ready


def test_a_bad_version_never_reaches_the_server(setup: Setup) -> None:
    setup.store.add("m", 2, "bad")
    setup.settle()
    setup.settle()
    assert setup.admitted == [("m", 2)]
    assert setup.triton.loads == []
    assert setup.triton.serving("m") == [1]
    assert setup.stores.refusals() == {}  # of what it knew at the start
    setup.store.add("m", 2, "mended")
    setup.settle()
    assert setup.triton.serving("m") == [2]


def test_a_bad_new_model_takes_no_readiness_away(setup: Setup) -> None:
    setup.store.add("late", 1, "bad")
    setup.settle()
    assert setup.triton.ready
    assert "late" not in setup.stores.served
    setup.store.add("late", 2)
    setup.settle()
    assert setup.triton.serving("late") == [2]


def test_a_folder_that_is_still_being_written_waits(setup: Setup) -> None:
    for written in ("a", "ab", "abc"):
        setup.store.add("m", 2, written)
        assert setup.poller.poll() is True
        assert setup.admitted == []
    assert setup.poller.poll() is False
    assert setup.admitted == [("m", 2)]


def test_a_version_that_is_replaced_in_place_is_loaded_again(setup: Setup) -> None:
    setup.store.add("m", 1, "another")
    setup.settle()
    assert setup.admitted == [("m", 1)]
    assert setup.triton.loads == ["m"]


def test_bad_files_in_place_of_good_ones_change_nothing(setup: Setup) -> None:
    setup.store.add("m", 2)
    setup.settle()
    setup.triton.loads.clear()
    setup.store.add("m", 2, "bad")
    setup.settle()
    assert setup.triton.loads == []
    assert setup.triton.serving("m") == [2]


@pytest.mark.parametrize("config", ["hello {", "version_policy { specific { versions: 9 } }"])
def test_a_bad_configuration_changes_nothing(setup: Setup, config: str) -> None:
    (setup.store.folder / "m" / "config.pbtxt").write_text(config)
    setup.settle()
    assert setup.triton.loads == []
    assert setup.triton.serving("m") == [1]


def test_another_configuration_is_admitted_for_every_version(setup: Setup) -> None:
    setup.store.add("m", 2, config="version_policy { all { } }")
    setup.settle()
    assert sorted(setup.admitted) == [("m", 1), ("m", 2)]


def test_a_version_that_is_removed_gives_way_to_an_admitted_one(setup: Setup) -> None:
    setup.store.add("m", 2)
    setup.settle()
    shutil.rmtree(setup.store.folder / "m" / "2")
    setup.settle()
    assert setup.admitted == [("m", 2), ("m", 1)]
    assert setup.triton.serving("m") == [1]


@pytest.mark.parametrize("remove", [shutil.rmtree, lambda model: shutil.rmtree(model / "1")])
def test_a_model_that_is_removed_is_unloaded(setup: Setup, remove: Callable[[Path], None]) -> None:
    remove(setup.store.folder / "m")
    setup.settle()
    assert setup.triton.serving("m") == []
    assert setup.triton.serving("n") == [1]
    assert setup.triton.ready


def test_a_store_that_is_gone_is_not_empty(setup: Setup, logged: list[str]) -> None:
    setup.store.folder.rename(setup.store.folder.with_name("away"))
    for _ in range(3):
        assert setup.poller.poll() is False
    assert setup.triton.serving("m") == [1]
    assert sum("what is served stays" in message for message in logged) == 1
    setup.store.folder.with_name("away").rename(setup.store.folder)
    setup.settle()
    assert setup.triton.loads == []


def test_another_file_system_is_not_an_empty_store(setup: Setup, logged: list[str]) -> None:
    setup.poller._devices = {setup.store.folder: -1}
    shutil.rmtree(setup.store.folder / "m")
    assert setup.poller.poll() is False
    assert setup.triton.serving("m") == [1]
    assert "another file system" in logged[-1]


def test_an_admitted_version_that_fails_in_the_server_gives_way(setup: Setup) -> None:
    setup.store.add("m", 2, "bad in the server only")
    setup.settle()
    assert setup.triton.serving("m") == [1]
    assert setup.triton.ready


def test_a_model_in_two_stores_keeps_serving(setup: Setup, tmp_path: Path) -> None:
    second = StoreOfFakes(tmp_path / "second")
    setup.stores.stores = [setup.store.folder, second.folder]
    setup.settle()
    second.add("m", 5)
    setup.settle()
    assert setup.triton.serving("m") == [1]


class TestWhatCannotBeRead:
    """Folders that are there and fail: a disk with bad blocks, a network file system that is away, another's rights."""

    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> dict[Path, OSError]:
        """The error that listing each of some folders ends with."""
        errors: dict[Path, OSError] = {}
        iterdir = Path.iterdir

        def fail(path: Path) -> Iterator[Path]:
            if path in errors:
                raise errors[path]
            return iterdir(path)

        monkeypatch.setattr(Path, "iterdir", fail)
        return errors

    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
    @pytest.mark.parametrize("inside", [".", "m", "m/1"])
    def test_it_takes_nothing_away_and_is_taken_up_when_it_is_back(
        self, setup: Setup, failing: dict[Path, OSError], logged: list[str], inside: str, number: int
    ) -> None:
        failing[setup.store.folder / inside] = OSError(number, os.strerror(number))
        for _ in range(3):
            setup.settle()
        assert (setup.triton.serving("m"), setup.triton.serving("n")) == ([1], [1])
        assert setup.triton.loads == []
        assert len([line for line in logged if "stays" in line and os.strerror(number) in line]) == 1
        assert not any("not served" in line for line in logged)
        setup.store.add("m", 2)
        failing.clear()
        setup.settle()
        assert setup.triton.serving("m") == [2]


def test_a_model_that_is_replaced_by_renaming_is_not_unloaded(setup: Setup, tmp_path: Path) -> None:
    folder = setup.store.folder / "m"
    folder.rename(tmp_path / "away")
    assert setup.poller.poll(), "another look should follow soon"
    (tmp_path / "away").rename(folder)
    setup.settle()
    assert setup.triton.serving("m") == [1]
    assert setup.triton.loads == []


@pytest.mark.parametrize("link", ["store", "model"])
def test_a_link_that_is_swapped_is_followed(setup: Setup, tmp_path: Path, link: str) -> None:
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


class TestAnotherSignature:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)))
        return tmp_path / "store"

    @pytest.fixture
    def poller(self, store: Path, tmp_path: Path) -> Poller:
        mirror, stores = Mirror(tmp_path / "overlay"), ManagedStores([store])
        stores.open(mirror, frozenset({BACKEND, DROP_IN_BACKEND}), lambda folder: folder)
        triton = FakeTriton(mirror.path)
        triton.start()
        poller = Poller(stores, mirror, triton, lambda *_: Verdict(""), 5.0)
        settle(poller)
        return poller

    def test_a_version_with_it_is_refused_with_the_way_out(
        self, poller: Poller, store: Path, logged: list[str]
    ) -> None:
        zoo.add(store, "m", zoo.scale(("batch", 4)), version=2)
        settle(poller)
        settle(poller)
        refused = [line for line in logged if "version 2 is not served" in line]
        assert len(refused) == 1
        assert "not that of version 1, which serves: output 'y' is FP32 [4], not FP32 [3]" in refused[0]
        assert "--name" in refused[0]
        assert poller.stores.served["m"].versions == (1,)
        assert "signature" in poller.stores.refusals()["m", "2"]

    def test_the_next_version_is_not_kept_away(self, poller: Poller, store: Path) -> None:
        zoo.add(store, "m", zoo.scale(("batch", 4)), version=2)
        settle(poller)
        zoo.add(store, "m", zoo.scale(("batch", 3), 5), version=3)
        settle(poller)
        assert poller.stores.served["m"].versions == (3,)

    def test_it_is_served_when_the_others_are_gone(self, poller: Poller, store: Path) -> None:
        zoo.add(store, "m", zoo.scale(("batch", 4)), version=2)
        settle(poller)
        shutil.rmtree(store / "m" / "1")
        settle(poller)
        assert poller.stores.served["m"].versions == (2,)
        assert poller.stores.refusals() == {}

    def test_files_in_place_are_no_way_around(self, poller: Poller, store: Path) -> None:
        served = poller.stores.served["m"]
        shutil.rmtree(store / "m" / "1")
        zoo.add(store, "m", zoo.scale(("batch", 4)))
        settle(poller)
        assert poller.stores.served["m"] is served

    def test_a_configuration_that_somebody_writes_for_what_serves_is_taken(self, poller: Poller, store: Path) -> None:
        (store / "m" / "config.pbtxt").write_text("max_batch_size: 0")
        text = 'input { name: "x" dims: [-1, 3] } output { name: "y" dims: [-1, 3] }'
        (store / "m" / "config.pbtxt").write_text(text.replace("-1", "2") + " max_batch_size: 0")
        settle(poller)
        config = poller.stores.served["m"].config
        assert config is not None
        assert config.input[0].dims == [2, 3]


def test_a_folder_that_comes_as_a_broken_model_is_named_once(setup: Setup, logged: list[str]) -> None:
    (setup.store.folder / "docs").mkdir()
    (setup.store.folder / "wrong").mkdir()
    (setup.store.folder / "wrong" / "model.onnx").write_text("good")
    for _ in range(2):
        setup.settle()
    assert [line for line in logged if "wrong" in line] == [
        f"wrong: is not served: {setup.store.folder / 'wrong'} has no version folder: make wrong/1"
    ]
    assert setup.triton.ready
    (setup.store.folder / "wrong" / "model.onnx").unlink()
    setup.store.add("wrong", 1, config="")
    setup.settle()
    assert setup.triton.serving("wrong") == [1]


def test_an_empty_folder_becomes_a_model(setup: Setup) -> None:
    (setup.store.folder / "new").mkdir()
    setup.settle()
    setup.store.add("new", 1, config="")
    setup.settle()
    assert setup.triton.serving("new") == [1]


def test_a_link_that_leads_nowhere_for_a_while_takes_nothing_away(
    setup: Setup, tmp_path: Path, logged: list[str]
) -> None:
    place, disk = setup.store.folder / "m", tmp_path / "disk"
    place.rename(disk)
    place.symlink_to(disk)
    setup.settle()
    disk.rename(tmp_path / "away")
    for _ in range(3):
        setup.settle()
    assert setup.triton.serving("m") == [1]
    assert [line for line in logged if "leads nowhere" in line] == [
        f"m: what is served of it stays: {place} is a link that leads nowhere: {disk} is not there"
    ]
    place.unlink()
    setup.settle()
    assert setup.triton.serving("m") == []
