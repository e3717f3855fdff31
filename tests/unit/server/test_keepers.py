"""What the control modes do beside a running server."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_repository import FakeTriton, StoreOfFakes

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server import admission as admission_module
from graphkiln_backend.server.admission import Candidate, Verdict
from graphkiln_backend.server.flags import ControlMode
from graphkiln_backend.server.launch import Admission, ManagedKeeper
from graphkiln_backend.server.managed_stores import ManagedStores, ServedModel
from graphkiln_backend.server.mirror import Mirror


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    overrides = {"m": [parse_override("precision=bf16")]}
    return Admission(
        overrides=overrides, cache=CacheSettings(), temporary=tmp_path, deadline_s=7, stopped=lambda: False
    )


def make_keeper(name: str, store: StoreOfFakes, folder: Path, admission: Admission) -> tuple[ManagedKeeper, FakeTriton]:
    mirror = Mirror(folder / "overlay")
    stores = ManagedStores([store.folder])
    stores.open(mirror, frozenset(), None)
    triton = FakeTriton(mirror.path)
    triton.start()
    mode = ControlMode(name=name, poll_s=0.5, managed=True, completes=True)
    keeper = ManagedKeeper(
        mode=mode, stores=stores, mirror=mirror, control=triton, admission=admission, load_timeout_s=9
    )
    return keeper, triton


def test_after_the_start_older_versions_take_over(
    fake_store: StoreOfFakes, tmp_path: Path, admission: Admission
) -> None:
    fake_store.add("m", 1)
    fake_store.add("m", 2, "bad")
    keeper, triton = make_keeper("none", fake_store, tmp_path, admission)
    keeper.settle()
    assert triton.serving("m") == [1]
    assert triton.ready


def test_without_polling_nothing_more_is_done(fake_store: StoreOfFakes, tmp_path: Path, admission: Admission) -> None:
    keeper, triton = make_keeper("none", fake_store, tmp_path, admission)
    fake_store.add("m", 1)
    assert keeper.tick() is None
    assert triton.loads == []


def test_polling_looks_again_soon_while_something_changes(
    fake_store: StoreOfFakes, tmp_path: Path, admission: Admission
) -> None:
    keeper, triton = make_keeper("poll", fake_store, tmp_path, admission)
    fake_store.add("m", 1)
    assert keeper.tick() == 0.5
    assert keeper.tick() == 0.5
    assert triton.serving("m") == [1]


def test_a_version_is_proven_as_it_would_be_served(
    fake_store: StoreOfFakes, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Candidate, float, int]] = []

    def admit(candidate: Candidate, *, deadline_s: float, stopped: object) -> Verdict:
        assert stopped is admission.stopped
        seen.append((candidate, deadline_s, read_config(candidate.config).max_batch_size))
        return Verdict("no")

    monkeypatch.setattr(admission_module, "admit", admit)
    fake_store.add("m", 4, config="")
    stored = scan_stores([fake_store.folder])["m"]
    model = ServedModel(stored=stored, versions=(4,), config=ModelConfigProto(max_batch_size=9))
    assert admission(model, 4).reason == "no"
    ((candidate, deadline_s, max_batch_size),) = seen
    assert candidate.folder == fake_store.folder / "m" / "4"
    assert [override.value for override in candidate.overrides] == ["bf16"]
    assert (deadline_s, max_batch_size) == (7, 9)
