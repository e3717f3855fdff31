"""Remote stores beside a running server: followed in time, never waited for at its end, copies kept apart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.remote_copy import Changes
from graphkiln_backend.server.remote_stores import (
    FollowingKeeper,
    RemoteStore,
    RemoteStores,
    call_until,
    copy_stores,
    open_remote_stores,
)
from graphkiln_backend.server.rollout import AdmissionStopped
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile

NO_NETWORK = RemoteStoreError("s3://bucket/store: cannot be reached", passing=True)
DENIED = RemoteStoreError("s3://bucket/store: access is denied")


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


def never() -> bool:
    return False


class FakeKeeper:
    def __init__(self, ticks: bool = True) -> None:
        self.ticks = ticks
        self.ticked = 0

    def is_settled(self) -> bool:
        return True

    def settle(self) -> None:
        pass

    def tick(self) -> float | None:
        self.ticked += 1
        return 5.0 if self.ticks else None


def test_a_first_start_without_the_network_fails() -> None:
    store, _ = remote_store(NO_NETWORK, is_empty=True)
    with pytest.raises(RemoteStoreError):
        store.begin()


def test_a_later_one_serves_what_was_copied(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = remote_store(NO_NETWORK)
    store.begin()
    assert "cannot be reached; what was copied before is served" in caplog.text


def test_a_store_without_a_model_may_be_another_one_than_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    remote_store(is_empty=True)[0].begin()
    assert "s3://bucket/store holds no model: is that the right address?" in caplog.text
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


def test_access_that_is_denied_ends_the_start_whatever_was_copied() -> None:
    store, _ = remote_store(DENIED)
    with pytest.raises(RemoteStoreError):
        store.begin()


def test_trouble_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, copy = remote_store(NO_NETWORK, NO_NETWORK, OSError(28, "no space left"))
    for _ in range(4):
        assert not store.follow(never)
    assert caplog.text.count("what is served stays") == 1
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


def test_a_service_that_does_not_answer_does_not_delay_the_end() -> None:
    release = threading.Event()

    def hang() -> Changes:
        release.wait(60)
        return Changes(folder=Path(), listing={})

    begun = time.monotonic()
    with pytest.raises(AdmissionStopped):
        call_until(hang, lambda: time.monotonic() - begun > 0.2)
    release.set()


def test_a_keeper_follows_in_time_and_ticks_in_between() -> None:
    store, copy = remote_store()
    inner = FakeKeeper()
    keeper = RemoteStores([store], every_s=100.0).follow(inner, never)
    assert isinstance(keeper, FollowingKeeper)
    assert [keeper.tick(), keeper.tick()] == [5.0, 5.0]
    assert (len(copy.taken), inner.ticked) == (1, 2)


def test_what_still_changes_is_looked_at_soon() -> None:
    waiting = Changes(folder=Path(), listing={}, waiting=frozenset({("a", "1")}))
    store, _ = remote_store(waiting)
    pause = RemoteStores([store], every_s=100.0).follow(FakeKeeper(), never).tick()
    assert pause is not None
    assert pause <= 1.0


def test_where_nothing_is_polled_nothing_follows() -> None:
    store, copy = remote_store()
    assert RemoteStores([store]).follow(FakeKeeper(ticks=False), never).tick() is None
    assert copy.taken == []


def test_without_remote_stores_the_keeper_stays_as_it_is() -> None:
    keeper = FakeKeeper()
    assert RemoteStores().follow(keeper, never) is keeper


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


def test_a_copy_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RemoteStore, "begin", fail)
    opened: Callable[[], Any] = lambda: copy_stores(  # noqa: E731
        [parsed("s3://bucket/store")], CacheSettings(folder=tmp_path / "cache"), 15.0
    )
    with pytest.raises(ServerSetupError, match="cannot be copied"), opened():
        pass
