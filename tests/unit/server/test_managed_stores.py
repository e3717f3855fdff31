"""Versions that are shown to Triton at the first start and at later ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import zoo
from fake_repository import StoreOfFakes

from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server import managed_stores as module
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror

BACKENDS = frozenset({BACKEND, DROP_IN_BACKEND})
ALL = "version_policy { all { } }"


def as_is(version: Path) -> Path:
    return version


def versions(mirror: Mirror, model: str) -> list[str]:
    return sorted(path.name for path in (mirror.path / model).iterdir() if path.name.isdecimal())


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "overlay")


class TestFirstStart:
    def test_the_policy_selects(self, fake_store: StoreOfFakes, mirror: Mirror) -> None:
        for version in (1, 2):
            fake_store.add("newest", version)
            fake_store.add("every", version, config=ALL)
        stores = ManagedStores([fake_store.folder])
        assert stores.open(mirror, BACKENDS, None) is False  # configurations are as written
        assert (versions(mirror, "newest"), versions(mirror, "every")) == (["2"], ["1", "2"])

    def test_a_model_of_another_backend_keeps_its_own(self, tmp_path: Path, mirror: Mirror) -> None:
        zoo.add(tmp_path / "store", "bare", zoo.scale(("batch", 3)))
        zoo.add(tmp_path / "store", "other", zoo.scale(("batch", 3)), 'backend: "tensorflow"')
        assert ManagedStores([tmp_path / "store"]).open(mirror, BACKENDS, as_is) is False
        assert (mirror.path / "other" / "config.pbtxt").is_symlink()
        assert not (mirror.path / "bare" / "config.pbtxt").is_symlink()

    @pytest.mark.parametrize("backend", ["", 'backend: "tensorflow"'])
    def test_instances_on_a_missing_gpu_are_refused_with_the_fix(
        self, tmp_path: Path, mirror: Mirror, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_gpu = f"{backend} instance_group [ {{ kind: KIND_AUTO }}, {{ kind: KIND_GPU }} ]"
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), on_gpu)
        for driver, is_shown in ((tmp_path / "none", False), (tmp_path, True)):
            monkeypatch.setattr(module, "gpus", tuple)
            monkeypatch.setattr(module, "_NVIDIA_DRIVER", driver)
            stores = ManagedStores([tmp_path / "store"])
            stores.open(mirror, BACKENDS, as_is)
            assert bool(stores.shown["m"].versions) == is_shown
            assert [("write kind: KIND_CPU" in reason) for reason in stores.refusals().values()] == [True] * (
                not is_shown
            )

    def test_a_version_without_a_graph_gives_way_to_an_older_one(self, tmp_path: Path, mirror: Mirror) -> None:
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)))
        broken = zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), version=2)
        (broken / "model.onnx").write_bytes(b"PK")
        stores = ManagedStores([tmp_path / "store"])
        assert stores.open(mirror, BACKENDS, as_is) is True
        assert versions(mirror, "m") == ["1"]
        assert "cut short" in stores.refusals()["m", "2"]

    def test_an_unexpected_error_of_one_model_does_not_affect_others(
        self, tmp_path: Path, mirror: Mirror, logged: list[str]
    ) -> None:
        for name in ("bad", "good"):
            zoo.add(tmp_path / "store", name, zoo.scale(("batch", 3)))

        def fail_on_bad(version: Path) -> Path:
            if version.parent.name == "bad":
                raise ZeroDivisionError("by a graph")
            return version

        stores = ManagedStores([tmp_path / "store"])
        assert stores.open(mirror, BACKENDS, fail_on_bad) is True
        assert versions(mirror, "good") == ["1"]
        assert stores.refusals() == {("bad", "1"): "ZeroDivisionError: by a graph"}
        assert logged[0] == "bad version 1 cannot be read", "with its traceback"

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ("hello {", "is not a model configuration"),
            ('input { name: "z" }', "'z' is not in the graph"),
            ("version_policy { specific { versions: 7 } }", "selects no version"),
        ],
    )
    def test_a_bad_configuration_is_a_placeholder_that_says_so(
        self, tmp_path: Path, mirror: Mirror, config: str, words: str
    ) -> None:
        zoo.add(tmp_path / "store", "bad", zoo.scale(("batch", 3)), config)
        zoo.add(tmp_path / "store", "good", zoo.scale(("batch", 3)))
        stores = ManagedStores([tmp_path / "store"])
        assert stores.open(mirror, BACKENDS, as_is) is True
        assert words in (mirror.path / "bad" / "1" / "model.py").read_text().replace("\\'", "'")
        assert words in stores.refusals()["bad", "1"]
        assert versions(mirror, "good") == ["1"]

    def test_a_model_without_versions_is_a_placeholder(self, fake_store: StoreOfFakes, mirror: Mirror) -> None:
        (fake_store.folder / "broken").mkdir()
        (fake_store.folder / "broken" / "model.onnx").touch()
        (fake_store.folder / "empty").mkdir()
        stores = ManagedStores([fake_store.folder])
        stores.open(mirror, BACKENDS, None)
        assert "no version folder" in (mirror.path / "broken" / "1" / "model.py").read_text()
        assert list(stores.shown) == ["broken"]
        assert not stores.shows_all()


class TestLaterStarts:
    @pytest.fixture
    def stores(self, fake_store: StoreOfFakes, mirror: Mirror) -> ManagedStores:
        """Has been started once, with versions 1 and 2 of `m`."""
        fake_store.add("m", 1)
        fake_store.add("m", 2, config="")
        stores = ManagedStores([fake_store.folder])
        stores.open(mirror, BACKENDS, None)
        return stores

    def again(self, stores: ManagedStores, tmp_path: Path) -> Mirror:
        mirror = Mirror(tmp_path / "again")
        stores.open(mirror, BACKENDS, None)
        return mirror

    def test_what_was_added_meanwhile_is_not_shown(
        self, stores: ManagedStores, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        fake_store.add("m", 3, "bad")
        fake_store.add("n", 1, "bad")
        mirror = self.again(stores, tmp_path)
        assert versions(mirror, "m") == ["2"]
        assert not (mirror.path / "n").exists()

    def test_a_model_that_never_had_a_version_stays_a_placeholder(
        self, stores: ManagedStores, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        model = stores.shown["m"].stored
        for version in (1, 2):
            stores.quarantine.add(model, version, "it crashed")
        assert (self.again(stores, tmp_path).path / "m" / "2" / "model.py").is_file()
        fake_store.add("m", 2, "mended")
        assert versions(self.again(stores, tmp_path / "b"), "m") == ["2"]

    def test_a_model_that_is_gone_is_gone(
        self, stores: ManagedStores, fake_store: StoreOfFakes, tmp_path: Path
    ) -> None:
        shutil.rmtree(fake_store.folder / "m")
        assert not (self.again(stores, tmp_path).path / "m").exists()


def test_other_files_are_another_model(fake_store: StoreOfFakes) -> None:
    fake_store.add("m", 1, config="")
    stores = ManagedStores([fake_store.folder])

    old = stores.plan(scan_stores(stores.stores)["m"], [1])
    assert stores.plan(scan_stores(stores.stores)["m"], [1]).shows(old)
    fake_store.add("m", 1, "others")
    assert not stores.plan(scan_stores(stores.stores)["m"], [1]).shows(old)


def test_of_versions_side_by_side_the_older_one_with_another_signature_is_refused(
    tmp_path: Path, mirror: Mirror, logged: list[str]
) -> None:
    folder = zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 4)), ALL)
    for version in (2, 3):
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), version=version)
    (folder.parent / "config.pbtxt").write_text(ALL)
    stores = ManagedStores([tmp_path / "store"])
    stores.open(mirror, BACKENDS, as_is)
    assert versions(mirror, "m") == ["2", "3"]
    assert "m version 1 is not served: newer versions have another signature" in logged[-1]
    assert "--name" in logged[-1]
    assert list(stores.refusals()) == [("m", "1")]
    for version in (2, 3):
        shutil.rmtree(tmp_path / "store" / "m" / str(version))
    found = scan_stores(stores.stores)["m"]
    assert stores.plan(found, found.versions).versions == (1,)


def test_a_version_that_would_hang_its_reader_takes_no_other_with_it(
    tmp_path: Path, mirror: Mirror, logged: list[str]
) -> None:
    loop = zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3))).parent / "3"
    loop.symlink_to(loop)
    os.mkfifo(zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), version=2) / "manifest.json")
    stores = ManagedStores([tmp_path / "store"])
    stores.open(mirror, BACKENDS, as_is)
    assert versions(mirror, "m") == ["1"]  # and no link to a link to itself, which Triton does not take
    assert "neither a file nor a folder" in stores.refusals()["m", "2"]
    assert len([line for line in logged if "is not served" in line]) == 1
    (tmp_path / "store" / "m" / "2" / "manifest.json").unlink()
    found = scan_stores(stores.stores)["m"]
    assert stores.plan(found, found.versions).versions == (2,)


@pytest.mark.parametrize(
    ("name", "content", "provable"),
    [
        ("golden.npz", "", True),
        ("manifest.json", '{"format_version": 2, "graph_file": "model.pt"', True),
        ("manifest.json", '{"name": "of another tool"}', False),
    ],
)
def test_half_copied_versions_are_not_taken_for_bare_ones(
    fake_store: StoreOfFakes, name: str, content: str, *, provable: bool
) -> None:
    (fake_store.add("m", 1) / name).write_text(content)
    stored = scan_stores([fake_store.folder])["m"]
    assert ShownModel(stored=stored, versions=(1,), other=True).provable == ((1,) if provable else ())


class TestNativeSeat:
    @pytest.fixture
    def stores(self, tmp_path: Path) -> ManagedStores:
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)))
        stores = ManagedStores([tmp_path / "store"], seat=lambda config, _: config)
        stores.open(Mirror(tmp_path / "overlay"), BACKENDS, as_is)
        return stores

    def test_every_version_is_proven(self, stores: ManagedStores) -> None:
        assert stores.shown["m"].provable == (1,)

    def test_graphkiln_computes_what_the_cpp_backend_gets_wrong(self, stores: ManagedStores) -> None:
        shown = stores.shown["m"]
        stores.refuse(shown, 1, "it is wrong")
        planned = stores.plan(shown.stored, shown.versions)
        assert (planned.versions, planned.native, planned.provable) == ((1,), None, ())
        assert not stores.refusals()

    def test_a_requested_seat_is_kept(self, stores: ManagedStores) -> None:
        stores.must_be_native.add("m")
        shown = stores.shown["m"]
        stores.refuse(shown, 1, "it is wrong")
        planned = stores.plan(shown.stored, shown.versions)
        assert planned.native is not None
        assert planned.native.optimization.graph.level == 2
        assert not planned.shows(shown), "it is proven again"
        stores.refuse(planned, 1, "it is wrong")
        assert stores.plan(shown.stored, shown.versions).versions == ()
        assert stores.refusals()["m", "1"] == "it is wrong"

    def test_what_was_right_once_is_not_tried_without_rewrites(self, stores: ManagedStores) -> None:
        stores.must_be_native.add("m")
        shown = stores.shown["m"]
        stores.refuse(shown, 1, "it is wrong", was_proven=True)
        assert stores.plan(shown.stored, shown.versions).versions == ()
