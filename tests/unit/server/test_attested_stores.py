"""The copies follow their stores, and what is refused is put beside them."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from signed import SignedStore, make_key

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.attestation import sign_version
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server.attested_stores import (
    AttestedCopy,
    AttestedStore,
    AttestedStores,
    attested_stores,
    read_trusted,
)
from graphkiln_backend.server.managed_stores import ManagedStores
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.rollout import AdmissionStopped


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


@pytest.fixture
def store(signed: SignedStore, tmp_path: Path) -> AttestedStore:
    (tmp_path / "copies").mkdir()
    return AttestedStore(signed.folder, AttestedCopy(tmp_path / "copies", signed.trusted))


def shown(store: AttestedStore) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in store.copy.store.glob("m/*/model.onnx")}


def never() -> bool:
    return False


class TestStore:
    def test_what_comes_is_taken_over_once_it_stays_the_same(self, signed: SignedStore, store: AttestedStore) -> None:
        signed.add(1, "one")
        store.begin()
        signed.add(2, "two")
        assert store.follow(never) is True  # it may still be copied
        assert shown(store) == {"1": "one"}
        assert store.follow(never) is False
        assert shown(store) == {"1": "one", "2": "two"}

    def test_what_goes_is_missed_twice(self, signed: SignedStore, store: AttestedStore) -> None:
        model = signed.add(1, "one")
        store.begin()
        aside = model.rename(signed.folder / ".m")
        assert store.follow(never) is True
        aside.rename(model)
        store.follow(never)
        assert shown(store) == {"1": "one"}
        shutil.rmtree(model)
        store.follow(never)
        store.follow(never)
        assert not list(store.copy.store.iterdir())

    def test_a_store_that_cannot_be_read_takes_nothing_away(
        self, signed: SignedStore, store: AttestedStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        signed.add(1, "one")
        store.begin()
        signed.folder.rename(signed.folder.with_name("away"))
        for _ in range(3):
            assert store.follow(never) is False
        assert shown(store) == {"1": "one"}
        assert caplog.text.count("what is served stays") == 1

    def test_it_gives_up_when_the_server_stops(self, signed: SignedStore, store: AttestedStore) -> None:
        store.begin()
        signed.add(1, "one")
        store.follow(never)
        with pytest.raises(AdmissionStopped):
            store.follow(lambda: True)


class TestMark:
    def managed(self, store: AttestedStore) -> ManagedStores:
        return ManagedStores([store.copy.store], mark=AttestedStores([store]).mark)

    def test_a_refused_version_is_named_with_its_reason(
        self, signed: SignedStore, store: AttestedStore, tmp_path: Path
    ) -> None:
        signed.add(1, "one")
        signed.add(2, "two", signed=False)
        store.begin()
        managed = self.managed(store)
        managed.open(Mirror(tmp_path / "overlay"), frozenset(), None)
        assert managed.served["m"].versions == (1,)
        assert "it is not signed" in managed.refusals()["m", "2"]

    def test_a_model_without_a_signed_version_is_not_ready_and_says_why(
        self, signed: SignedStore, store: AttestedStore, tmp_path: Path
    ) -> None:
        model = signed.add(1, "one", signed=False)
        store.begin()
        managed = self.managed(store)
        managed.open(Mirror(tmp_path / "overlay"), frozenset(), None)
        assert managed.served["m"].versions == ()
        assert "it is not signed" in managed.refusals()["m", "1"]
        sign_version(model, 1, signed.key)
        for _ in range(2):
            store.follow(never)
        stored = managed.scan()["m"]
        assert managed.plan(stored, stored.versions).versions == (1,)

    def test_a_version_that_serves_from_its_copy_is_no_fault(self, signed: SignedStore, store: AttestedStore) -> None:
        model = signed.add(1, "one")
        store.begin()
        before = self.managed(store).scan()
        (model / "1" / "model.onnx").write_text("worse")
        for _ in range(2):
            store.follow(never)
        assert self.managed(store).scan() == before

    def test_a_model_without_versions_keeps_its_problem(self, signed: SignedStore, store: AttestedStore) -> None:
        (signed.folder / "m").mkdir()
        (signed.folder / "m" / "config.pbtxt").touch()
        store.begin()
        assert "has no version folder" in self.managed(store).scan()["m"].problem


class TestOpening:
    def test_without_keys_stores_are_served_as_they_are(self, signed: SignedStore) -> None:
        with attested_stores([signed.folder], None, CacheSettings(), 15) as (stores, attested):
            assert stores == [signed.folder]
            assert attested.mark(scan_stores(stores)) == scan_stores(stores)

    def test_copies_lie_beside_the_cache_and_go(self, signed: SignedStore, tmp_path: Path) -> None:
        signed.add(1, "one")
        cache = CacheSettings(folder=tmp_path / "cache")
        with attested_stores([signed.folder], signed.trusted, cache, 15) as ((copy,), _):
            assert copy.is_relative_to(tmp_path / "cache")
            assert (copy / "m" / "1" / "model.onnx").read_text() == "one"
        assert not list((tmp_path / "cache" / "attested").iterdir())

    def test_keys_that_cannot_be_read_are_the_options_fault(self, tmp_path: Path) -> None:
        assert read_trusted(None) is None
        with pytest.raises(ServerSetupError, match=r"--trusted-keys: the key .* cannot be read") as caught:
            read_trusted(tmp_path / "none.pub")
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(("mode", "told"), [(0o644, False), (0o664, True), (0o666, True)])
    def test_keys_that_others_can_write_are_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, told: bool
    ) -> None:
        _, public = make_key(tmp_path / "release")
        public.chmod(mode)
        assert read_trusted(tmp_path)
        assert ("release.pub can be written by other users" in caplog.text) is told

    def test_what_is_mounted_read_only_belongs_to_whoever_mounts_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kubernetes gives the folder of a ConfigMap to everybody (mode 2777), and mounts it read-only."""
        (tmp_path / "keys").mkdir()
        _, public = make_key(tmp_path / "keys" / "release")
        (tmp_path / "keys").chmod(0o2777)
        assert read_trusted(public)
        assert "keys can be written by other users" in caplog.text
        caplog.clear()
        status = os.statvfs(tmp_path)
        read_only = os.statvfs_result((*status[:8], status.f_flag | os.ST_RDONLY, *status[9:]))
        monkeypatch.setattr("os.statvfs", lambda _: read_only)
        assert read_trusted(public)
        assert not caplog.text


def test_the_log_names_who_signed(signed: SignedStore, store: AttestedStore, caplog: pytest.LogCaptureFixture) -> None:
    signed.add(1, "one")
    with caplog.at_level(logging.INFO):
        store.begin()
    assert f"m version 1 is signed by release ({signed.key.key_id[:16]})" in caplog.text
