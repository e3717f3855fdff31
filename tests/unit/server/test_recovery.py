"""After a load: older versions in the place of those that failed, and readiness that comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_repository import FakeTriton, StoreOfFakes

from graphkiln_backend.server.managed_stores import ManagedStores, brief, forget_failures, replace_failed
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import LoadOverride, VersionState

ALL = "version_policy { all { } }"


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "overlay")


def start(store: StoreOfFakes, mirror: Mirror) -> tuple[ManagedStores, FakeTriton]:
    stores, triton = ManagedStores([store.folder]), FakeTriton(mirror.path)
    stores.open(mirror, frozenset({"graphkiln"}), None)
    triton.start()
    return stores, triton


def settle(stores: ManagedStores, mirror: Mirror, triton: FakeTriton) -> None:
    replace_failed(stores, mirror, triton, timeout_s=5)
    forget_failures(stores, mirror, triton)


def test_nothing_is_loaded_where_nothing_failed(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("m", 1)
    stores, triton = start(fake_store, mirror)
    settle(stores, mirror, triton)
    assert triton.loads == []
    assert triton.ready


def test_the_newest_good_version_serves_and_readiness_comes_back(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("good", 1)
    for version, graph in ((1, "good"), (2, "good"), (3, "bad"), (4, "bad")):
        fake_store.add("m", version, graph)
    stores, triton = start(fake_store, mirror)
    assert not triton.ready
    settle(stores, mirror, triton)
    assert triton.serving("m") == [2]
    assert triton.ready
    assert set(triton.loads) == {"m"}
    assert stores.served["m"].versions == (2,)
    assert list(stores.refusals()) == [("m", "3"), ("m", "4")]
    assert [path.name for path in (mirror.path / "m").iterdir() if path.name.isdecimal()] == ["2"]


def test_of_several_versions_the_good_ones_serve(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    for version, graph in ((1, "good"), (2, "bad"), (3, "good")):
        fake_store.add("m", version, graph, ALL)
    stores, triton = start(fake_store, mirror)
    settle(stores, mirror, triton)
    assert triton.serving("m") == [1, 3]
    assert triton.ready


def test_a_model_without_a_good_version_keeps_readiness_down_and_the_others_serving(
    fake_store: StoreOfFakes, mirror: Mirror
) -> None:
    fake_store.add("good", 1)
    fake_store.add("m", 1, "bad")
    fake_store.add("m", 2, "bad")
    stores, triton = start(fake_store, mirror)
    settle(stores, mirror, triton)
    assert not triton.ready
    assert triton.serving("good") == [1]
    assert stores.served["m"].versions == ()


def test_what_triton_does_not_even_read_is_refused_with_a_word(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("m", 1)
    stores, triton = start(fake_store, mirror)
    triton._states.clear()
    settle(stores, mirror, triton)
    assert "see its message above" in stores.refusals()["m", "1"]
    assert not triton.ready


def test_a_failed_model_that_is_gone_is_forgotten(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("good", 1)
    fake_store.add("m", 1, "bad")
    stores, triton = start(fake_store, mirror)
    settle(stores, mirror, triton)
    del stores.served["m"]
    forget_failures(stores, mirror, triton)
    assert triton.ready
    assert not (mirror.path / "m").exists()


def test_a_model_that_cannot_be_forgotten_is_not_left_in_the_mirror(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("m", 1, "bad")
    stores, triton = start(fake_store, mirror)
    del stores.served["m"]

    def load(model: str, timeout_s: float, override: object) -> str:
        raise ConnectionError(f"{model} {timeout_s} {override}")

    triton.load = load  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        forget_failures(stores, mirror, triton)
    assert not (mirror.path / "m").exists()


def test_what_somebody_loads_meanwhile_is_not_unloaded(fake_store: StoreOfFakes, mirror: Mirror) -> None:
    fake_store.add("m", 1, "bad")
    stores, triton = start(fake_store, mirror)
    fake_store.add("m", 2)
    mirror.show(fake_store.folder / "m", [2], None)
    load = triton.load

    def load_both(model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        return load(model, timeout_s, override) or load(model, timeout_s)  # the second one has waited for the first

    triton.load = load_both  # type: ignore[method-assign]
    del stores.served["m"]
    forget_failures(stores, mirror, triton)
    assert triton.serving("m") == [2]
    assert triton.ready


def test_a_version_that_is_loading_has_not_failed() -> None:
    assert not VersionState(model="m", version="1", state="LOADING", reason="").failed


def test_a_reason_is_brief_and_names_the_users_files() -> None:
    reason = (
        "Internal: TritonModelException: m: /run/models/m/2/model.onnx is cut short\n\nAt:\n  model.py(86): load\n;"
    )
    assert brief(reason, Path("/run/models/m"), Path("/store/m")) == "/store/m/2/model.onnx is cut short"
    assert brief("odd;", Path("/run/models/m"), Path("/store/m")) == "odd"
