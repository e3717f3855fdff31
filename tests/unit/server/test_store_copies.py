"""Copies of remote stores and of what is signed: made at the start, kept apart, followed while the server runs."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from signed import Authority, SignedStore, make_key

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.remote_copy import Changes
from graphkiln_backend.repository.signing import sign_version
from graphkiln_backend.repository.signing_keys import TrustedKeys
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server.managed_stores import ManagedStores
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.store_copies import (
    AttestedStore,
    RemoteStore,
    StoreCopies,
    copied_stores,
    open_remote_stores,
    read_trusted,
    remove_unused,
)
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile
from graphkiln_backend.system.signals import ServerStopping

NO_NETWORK = RemoteStoreError("s3://bucket/store: cannot be reached", passing=True)
DENIED = RemoteStoreError("s3://bucket/store: access is denied")


def never() -> bool:
    return False


def parsed(text: str) -> RemoteAddress:
    address = RemoteAddress.parse(text)
    assert address
    return address


@dataclass
class FakeCopy:
    """A copy whose next fetches are given."""

    outcomes: list[Changes | Exception] = field(default_factory=list)
    is_empty: bool = False
    taken: list[Changes] = field(default_factory=list)

    store = Path("/copy/models")
    files: Any = field(default_factory=lambda: SimpleNamespace(address="s3://bucket/store"))

    def fetch(self, *, settled: bool = False) -> Changes:  # noqa: ARG002 - the same for all
        outcome = self.outcomes.pop(0) if self.outcomes else Changes(folder=Path(), listing={})
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def take_over(self, changes: Changes) -> None:
        self.taken.append(changes)

    def size_bytes(self) -> int:
        return 10**6


def remote_store(*outcomes: Changes | Exception, is_empty: bool = False) -> tuple[RemoteStore, FakeCopy]:
    copy: Any = FakeCopy(list(outcomes), is_empty)
    return RemoteStore(copy), copy


def test_a_first_start_without_the_network_fails() -> None:
    store, _ = remote_store(NO_NETWORK, is_empty=True)
    with pytest.raises(RemoteStoreError):
        store.begin()


def test_a_later_one_serves_what_was_copied(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = remote_store(NO_NETWORK)
    store.begin()
    assert "cannot be reached; the previous copy is served" in caplog.text


def test_a_store_without_a_model_may_be_another_one_than_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    remote_store(is_empty=True)[0].begin()
    assert "s3://bucket/store contains no model: is that the right address?" in caplog.text
    caplog.clear()
    remote_store()[0].begin()
    assert "holds no model" not in caplog.text


def test_a_start_that_is_stopped_says_what_it_was_at(caplog: pytest.LogCaptureFixture) -> None:
    stopped: Any = SystemExit(0)
    store, copy = remote_store(stopped, is_empty=True)
    with pytest.raises(SystemExit):
        store.begin()
    assert "s3://bucket/store: stopped after 0 s, before it was copied" in caplog.text
    assert copy.taken == []


def test_trouble_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, copy = remote_store(NO_NETWORK, NO_NETWORK, OSError(28, "no space left"))
    for _ in range(4):
        assert not store.follow(never)
    assert caplog.text.count("its models keep serving") == 1
    assert caplog.text.count("can be read again") == 1
    assert len(copy.taken) == 1


def test_what_changed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes = Changes(
        folder=Path(),
        listing={},
        changed=frozenset({("a", "2"), ("a", "")}),
        gone=frozenset({("b", "1")}),
        waiting=frozenset({("c", "1")}),
    )
    store, _ = remote_store(changes)
    assert store.follow(never)
    assert "a version 2: copied" in caplog.text
    assert "a configuration: copied" in caplog.text
    assert "b version 1: removed there" in caplog.text


def test_a_service_that_does_not_respond_does_not_delay_the_end() -> None:
    release = threading.Event()
    store, copy = remote_store()
    copy.fetch = lambda: release.wait(60)  # type: ignore[method-assign, assignment, return-value]
    begun = time.monotonic()
    with pytest.raises(ServerStopping):
        store.follow(lambda: time.monotonic() - begun > 0.2)
    release.set()


def test_copies_follow_when_it_is_time() -> None:
    store, copy = remote_store()
    copies = StoreCopies([store], every_s=100.0)
    first_s = copies.follow(never)
    assert 0 < copies.follow(never) <= first_s <= 100
    assert len(copy.taken) == 1


def test_two_servers_have_a_copy_each_and_the_next_one_takes_over_the_first(tmp_path: Path) -> None:
    settings = CacheSettings(folder=tmp_path / "cache")
    address = parsed("s3://bucket/store")
    with open_remote_stores([address], settings) as (first,):
        place = first.copy.folder
        assert place.parent == tmp_path / "cache" / "stores"
        with open_remote_stores([address], settings) as (second,):
            assert second.copy.folder != place
    with open_remote_stores([address, parsed("s3://bucket/other")], settings) as (again, other):
        assert again.copy.folder == place != other.copy.folder
        assert (place / "address").read_text() == "s3://bucket/store\n"


def test_without_a_cache_the_copy_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_remote_stores([parsed("s3://bucket/store")], CacheSettings()) as (store,):
        assert store.copy.folder.is_relative_to(tmp_path)
    assert not store.copy.folder.exists()


def test_a_model_is_no_store() -> None:
    listing = {"config.pbtxt": RemoteFile("x", 1), "1/model.onnx": RemoteFile("y", 1)}
    store, copy = remote_store(Changes(folder=Path(), listing=listing))
    copy.files.address = parsed("s3://bucket/store/digits")
    with pytest.raises(RemoteStoreError, match="is a model") as raised:
        store.begin()
    flags = "--model-store s3://bucket/store --model-control-mode=explicit --load-model=digits"
    assert raised.value.hint == f"to serve it alone: {flags}"


def test_a_copy_that_cannot_be_written_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RemoteStore, "begin", fail)
    opened = copied_stores([], [parsed("s3://bucket/store")], None, CacheSettings(folder=tmp_path / "cache"), 15.0)
    with pytest.raises(ServerSetupError, match="cannot be copied"), opened:
        pass


def test_copies_that_were_not_used_for_a_month_are_removed(tmp_path: Path) -> None:
    for name, age_days in (("old", 31), ("young", 29)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "address").write_text("s3://bucket/store\n")
        os.utime(tmp_path / name, (0, 100 * 86400 - age_days * 86400))
    remove_unused(tmp_path, 100 * 86400.0)
    assert [path.name for path in tmp_path.iterdir()] == ["young"]


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache" / "stores"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with open_remote_stores([parsed("s3://bucket/store")], CacheSettings(folder=tmp_path / "cache")) as (store,):
        assert not store.folder.is_relative_to(folder)
    assert "not trusted" in caplog.text


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


@pytest.fixture
def store(signed: SignedStore, tmp_path: Path) -> AttestedStore:
    return AttestedStore(signed.folder, tmp_path / "copies", signed.trusted)


def shown(store: AttestedStore) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in store.folder.glob("m/*/model.onnx")}


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
        assert not list(store.folder.iterdir())

    def test_a_store_that_cannot_be_read_takes_nothing_away(
        self, signed: SignedStore, store: AttestedStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        signed.add(1, "one")
        store.begin()
        signed.folder.rename(signed.folder.with_name("away"))
        for _ in range(3):
            assert store.follow(never) is False
        assert shown(store) == {"1": "one"}
        assert caplog.text.count("its models keep serving") == 1

    def test_it_gives_up_when_the_server_stops(self, signed: SignedStore, store: AttestedStore) -> None:
        store.begin()
        signed.add(1, "one")
        store.follow(never)
        with pytest.raises(ServerStopping):
            store.follow(lambda: True)


class TestMark:
    def managed(self, store: AttestedStore) -> ManagedStores:
        return ManagedStores([store.folder], mark=StoreCopies([store]).mark)

    def test_a_refused_version_is_named_with_its_reason(
        self, signed: SignedStore, store: AttestedStore, tmp_path: Path
    ) -> None:
        signed.add(1, "one")
        signed.add(2, "two", signed=False)
        store.begin()
        managed = self.managed(store)
        managed.open(Mirror(tmp_path / "overlay"), frozenset(), None)
        assert managed.shown["m"].versions == (1,)
        assert "it is not signed" in managed.refusals()["m", "2"]

    def test_a_model_without_a_signed_version_is_not_ready_and_says_why(
        self, signed: SignedStore, store: AttestedStore, tmp_path: Path
    ) -> None:
        model = signed.add(1, "one", signed=False)
        store.begin()
        managed = self.managed(store)
        managed.open(Mirror(tmp_path / "overlay"), frozenset(), None)
        assert managed.shown["m"].versions == ()
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


class TestOpening:
    def test_without_keys_stores_are_served_as_they_are(self, signed: SignedStore) -> None:
        with copied_stores([signed.folder], [], None, CacheSettings(), 15) as (stores, copies):
            assert stores == [signed.folder]
            assert copies.mark(scan_stores(stores)) == scan_stores(stores)
            assert copies.follow(never) == math.inf

    def test_copies_lie_beside_the_cache_and_go(self, signed: SignedStore, tmp_path: Path) -> None:
        signed.add(1, "one")
        cache = CacheSettings(folder=tmp_path / "cache")
        with copied_stores([signed.folder], [], signed.trusted, cache, 15) as ((copy,), _):
            assert copy.is_relative_to(tmp_path / "cache")
            assert (copy / "m" / "1" / "model.onnx").read_text() == "one"
        assert not list((tmp_path / "cache" / "attested").iterdir())

    def test_keys_that_cannot_be_read_are_the_options_fault(self, tmp_path: Path) -> None:
        assert read_trusted(None) is None
        with pytest.raises(ServerSetupError, match=r"--trusted-keys: the key .* cannot be read") as caught:
            read_trusted(tmp_path / "none.pub")
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(("mode", "warned"), [(0o644, False), (0o664, True), (0o666, True)])
    def test_keys_that_others_can_write_are_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
    ) -> None:
        _, public = make_key(tmp_path / "release")
        public.chmod(mode)
        assert read_trusted(tmp_path)
        assert ("release.pub can be written by other users" in caplog.text) is warned

    def test_keys_on_a_read_only_mount_are_safe(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kubernetes gives the folder of a ConfigMap to all users (mode 2777), and mounts it read-only."""
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


# Only what is signed gets into the copy, and what was signed once is not lost.


def take(store: AttestedStore) -> dict[str, str]:
    """Takes over the store; the graphs in the copy, by version."""
    for stored in scan_stores([store.source]).values():
        store.take(stored)
    return shown(store)


def refused(store: AttestedStore) -> dict[int, str]:
    return dict(store.refused()["m"].refused) if store.refused() else {}


def test_what_is_signed_is_copied_with_what_it_shares(signed: SignedStore, store: AttestedStore) -> None:
    signed.add(1, "one")
    assert take(store) == {"1": "one"}
    assert (store.folder / "m" / "config.pbtxt").read_text() == "max_batch_size: 8\n"
    assert not list(store.folder.glob("m/*/attestation.json"))


def test_what_is_not_signed_stays_out(signed: SignedStore, store: AttestedStore, tmp_path: Path) -> None:
    signed.add(1, "one")
    signed.add(2, "two", signed=False)
    signed.add(3, "three", key=make_key(tmp_path / "stranger")[0])
    assert take(store) == {"1": "one"}
    reasons = refused(store)
    assert "it is not signed" in reasons[2]
    assert "not trusted" in reasons[3]


def test_a_model_without_any_signed_version_is_a_placeholder_with_the_reason(
    signed: SignedStore, store: AttestedStore
) -> None:
    signed.add(1, "one", signed=False)
    assert take(store) == {}
    assert "it is not signed" in (store.folder / "m" / "1" / "model.py").read_text()
    sign_version(signed.folder / "m", 1, signed.key)
    assert take(store) == {"1": "one"}
    assert not refused(store)


def test_an_altered_version_serves_on_as_it_was_checked(
    signed: SignedStore, store: AttestedStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = signed.add(1, "one")
    take(store)
    (model / "1" / "model.onnx").write_text("worse")
    with caplog.at_level(logging.ERROR):
        assert take(store) == {"1": "one"}
    assert "is not the file that was signed" in caplog.text
    assert "the verified copy keeps serving" in caplog.text


def test_versions_that_were_signed_with_another_configuration_go(signed: SignedStore, store: AttestedStore) -> None:
    model = signed.add(1, "one")
    take(store)
    (model / "config.pbtxt").write_text("max_batch_size: 9\n")
    signed.add(2, "two")
    assert take(store) == {"2": "two"}
    assert (store.folder / "m" / "config.pbtxt").read_text() == "max_batch_size: 9\n"
    sign_version(model, 1, signed.key)
    assert take(store) == {"1": "one", "2": "two"}


def test_a_file_that_is_exchanged_while_it_is_copied_is_noticed(signed: SignedStore, store: AttestedStore) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    (stored,) = scan_stores([signed.folder]).values()
    left = iter([None] * 2)

    def exchange() -> None:  # once version 2 and its configuration are copied
        if next(left, "over") == "over":
            (model / "1" / "model.onnx").write_text("other")

    store.take(stored, exchange)
    shown = {path.parent.name: path.read_text() for path in store.folder.glob("m/*/model.onnx")}
    assert shown == {"2": "two"}
    assert "is not the file that was signed" in refused(store)[1]


def test_what_is_known_is_not_copied_again(signed: SignedStore, store: AttestedStore) -> None:
    signed.add(1, "one")
    take(store)
    inode = (store.folder / "m" / "1" / "model.onnx").stat().st_ino
    signed.add(2, "two")
    assert take(store) == {"1": "one", "2": "two"}
    assert (store.folder / "m" / "1" / "model.onnx").stat().st_ino == inode


def test_what_is_removed_goes_with_its_files(signed: SignedStore, store: AttestedStore, tmp_path: Path) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    take(store)
    shutil.rmtree(model / "1")
    assert take(store) == {"2": "two"}
    store._remove("m")
    assert not list(store.folder.iterdir())
    assert not list((tmp_path / "copies" / "contents").iterdir())


def test_an_interrupted_copy_leaves_nothing(signed: SignedStore, store: AttestedStore, tmp_path: Path) -> None:
    signed.add(1, "one")
    (stored,) = scan_stores([signed.folder]).values()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.take(stored, stop)
    assert not list((tmp_path / "copies" / "contents").iterdir())
    assert take(store) == {"1": "one"}


def test_a_pipe_does_not_block(signed: SignedStore, store: AttestedStore) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    (model / "2" / "model.onnx").unlink()
    os.mkfifo(model / "2" / "model.onnx")
    assert take(store) == {"1": "one"}
    assert "neither a file nor a folder" in refused(store)[2]


def test_what_a_link_leads_to_is_copied_and_not_the_link(
    signed: SignedStore, store: AttestedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who can write where it leads could exchange what serves."""
    weights = tmp_path / "weights.bin"
    weights.write_text("w")
    model = signed.add(1, "one", signed=False)
    (model / "1" / "weights.bin").symlink_to(weights)
    sign_version(model, 1, signed.key)
    take(store)
    copied = store.folder / "m" / "1" / "weights.bin"
    assert (copied.is_symlink(), copied.read_text()) == (False, "w")
    weights.write_text("other")
    take(store)
    assert copied.read_text() == "w"
    assert "1/weights.bin is not the file that was signed" in caplog.text


def test_a_file_that_is_added_later_does_not_get_in(
    signed: SignedStore, store: AttestedStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = signed.add(1, "one")
    take(store)
    (model / "1" / "model.py").write_text("evil")
    (model / "labels.txt").write_text("cat\n")
    assert take(store) == {"1": "one"}
    assert sorted(path.name for path in (store.folder / "m").iterdir()) == ["1", "config.pbtxt"]
    assert [path.name for path in (store.folder / "m" / "1").iterdir()] == ["model.onnx"]
    assert "1/model.py, labels.txt added" in caplog.text


def test_a_key_that_is_trusted_no_more_serves_nothing_after_the_next_start(signed: SignedStore, tmp_path: Path) -> None:
    second, _ = make_key(tmp_path / "second")
    signed.add(1, "one")
    signed.add(2, "two", key=second)
    both = TrustedKeys.read(tmp_path)
    assert take(AttestedStore(signed.folder, tmp_path / "before", both)) == {"1": "one", "2": "two"}
    after = AttestedStore(signed.folder, tmp_path / "after", signed.trusted)
    assert take(after) == {"1": "one"}
    assert f"signed by {second.key_id[:16]}, which is not trusted" in refused(after)[2]


def test_old_kind_of_signature_serves_and_is_named(
    signed: SignedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = signed.add_old()
    with caplog.at_level("INFO"):
        assert take(AttestedStore(signed.folder, tmp_path / "before", TrustedKeys.read(key))) == {"1": "one"}
    assert "m version 1 is signed by old (a69e40c8196185f7), in graphkiln's old format: sign it again" in caplog.text


def test_certificate_that_ended_serves_nothing(signed: SignedStore, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    signed.add(1, "one", key=authority.certify("release"))
    signed.add(2, "two", key=authority.certify("former", datetime(2026, 1, 2, tzinfo=UTC)))
    store = AttestedStore(signed.folder, tmp_path / "copies", TrustedKeys.read(authority.trusted))
    assert take(store) == {"1": "one"}
    assert "the certificate CN=former" in refused(store)[2]
