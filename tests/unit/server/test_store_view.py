"""The user's stores as Triton sees them, with some models from a mirror."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_repository import StoreOfFakes

from graphkiln_backend.server.mirror import Mirror, StoreView


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "overlay")


def graphs(folder: Path) -> dict[str, str]:
    """What lies in a store, by model and version."""
    return {f"{each.parent.parent.name} {each.parent.name}": each.read_text() for each in folder.glob("*/*/model.onnx")}


def test_stores_are_as_they_are_also_what_comes_later(fake_store: StoreOfFakes, mirror: Mirror, tmp_path: Path) -> None:
    view = StoreView(tmp_path / "view", [fake_store.folder], mirror)
    view.show_mirrored(())
    fake_store.add("m", 1)
    (path,) = view.paths
    assert graphs(path) == {"m 1": "good"}


def test_some_models_come_from_the_mirror_for_a_while(fake_store: StoreOfFakes, mirror: Mirror, tmp_path: Path) -> None:
    for model, version in (("m", 1), ("m", 2), ("n", 1)):
        fake_store.add(model, version)
    mirror.show(fake_store.folder / "m", [1], None)
    view = StoreView(tmp_path / "view", [fake_store.folder], mirror)
    for _ in range(2):
        view.show_mirrored({"m", "not mirrored"})
        assert graphs(view.paths[0]) == {"m 1": "good", "n 1": "good"}
        view.show_mirrored(())
        assert graphs(view.paths[0]) == {"m 1": "good", "m 2": "good", "n 1": "good"}


def test_another_view_of_the_same_run_takes_over(fake_store: StoreOfFakes, mirror: Mirror, tmp_path: Path) -> None:
    fake_store.add("m", 1)
    for _ in range(2):
        view = StoreView(tmp_path / "view", [fake_store.folder], mirror)
        view.show_mirrored({"m"})
    assert graphs(view.paths[0]) == {"m 1": "good"}


def test_each_store_has_its_own_path(fake_store: StoreOfFakes, mirror: Mirror, tmp_path: Path) -> None:
    second = StoreOfFakes(tmp_path / "second")
    second.add("n", 1)
    fake_store.add("m", 1)
    view = StoreView(tmp_path / "view", [fake_store.folder, second.folder], mirror)
    view.show_mirrored({"m"})
    assert [list(graphs(path)) for path in view.paths] == [["m 1"], ["n 1"]]
