"""The lock of a destination."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from graphkiln_backend.scoring.destinations import lock as module
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.lock import LOCK_S, Holder, Lock
from graphkiln_backend.scoring.errors import DestinationBusy, LockLost, StoreError

OTHER = """
import dataclasses, json
from graphkiln_backend.scoring.destinations.lock import Holder
print(json.dumps(dataclasses.asdict(Holder.of_this_process('other'))))
"""


OTHERS = memoryview(
    json.dumps({"holder": {"run_id": "second", "host": "far", "machine": "other", "pid": 1, "started": 1}}).encode()
)


class Aged(FolderStore):
    """A folder whose clock can be set forward."""

    added_s = 0.0

    def age_s(self, name: str) -> float | None:
        age_s = super().age_s(name)
        return None if age_s is None else age_s + self.added_s


@pytest.fixture
def store(tmp_path: Path) -> Aged:
    made = Aged(tmp_path)
    made.prepare()
    return made


@pytest.fixture
def take(store: Aged, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lock]]:
    """Takes the lock, also as if this process were one of another machine, whose life cannot be seen."""
    original, taken = Holder.of_this_process, []

    def take(run_id: str, *, elsewhere: bool = False) -> Lock:
        with monkeypatch.context() as patched:
            if elsewhere:
                other = staticmethod(lambda name: replace(original(name), machine="other", host="far"))
                patched.setattr(Holder, "of_this_process", other)
            taken.append(Lock(store, run_id))
        return taken[-1]

    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    yield take
    for lock in taken:
        lock.close()


def wait_for_loss(lock: Lock, act: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        act()
        lock.check()
        time.sleep(0.005)


def test_lock_of_a_dead_process_is_taken(take: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch) -> None:
    take("first")
    monkeypatch.setattr(Holder, "is_gone", True)
    take("second").check()


def test_lock_of_another_machine_is_taken_after_it_expires(take: Callable[..., Lock], store: Aged) -> None:
    take("first", elsewhere=True)
    with pytest.raises(DestinationBusy, match="on far"):
        take("second")
    store.added_s = LOCK_S + 1
    take("second").check()


def test_lock_is_renewed_and_its_loss_is_noticed(
    take: Callable[..., Lock], store: Aged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENEW_S", 0.01)
    lock = take("first")
    before = (tmp_path / module.NAME).stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while (tmp_path / module.NAME).stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, "it is not renewed"
    lock.check()
    with pytest.raises(LockLost, match="run second"):
        wait_for_loss(lock, lambda: store.replace(module.NAME, OTHERS))
    lock.close()
    assert b"second" in (store.read(module.NAME) or b""), "the lock of another run is left alone"


def test_lock_is_lost_if_the_store_fails_for_too_long(
    take: Callable[..., Lock], store: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("away", passing=True)

    monkeypatch.setattr(module, "_RENEW_S", 0.01)
    lock = take("first")
    with monkeypatch.context() as failing:
        failing.setattr(store, "replace", fail)
        time.sleep(0.1)
        lock.check()  # not yet
        lock._renewed -= LOCK_S
        with pytest.raises(StoreError, match="away"):
            wait_for_loss(lock)


def test_expired_lock_is_checked_before_its_next_renewal(
    take: Callable[..., Lock], store: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of the process, before the thread that renews the lock goes on."""
    monkeypatch.setattr(module, "_SETTLE_S", 1.0)
    lock = take("first")
    lock._renewed -= LOCK_S
    lock.check()  # nobody took it
    store.replace(module.NAME, OTHERS)
    lock.check()
    lock._renewed -= LOCK_S
    for _ in range(2):
        with pytest.raises(LockLost, match="run second"):
            lock.check()


def test_lock_is_lost_if_a_renewal_hangs(
    take: Callable[..., Lock], store: Aged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may take the lock while the write is under way, which then overwrites it."""
    monkeypatch.setattr(module, "_RENEW_S", 0.01)
    original, hangs = store.replace, threading.Event()

    def replace_late(name: str, content: memoryview) -> None:
        hangs.set()
        lock._renewed -= LOCK_S
        time.sleep(0.3)
        original(name, content)

    lock = take("first")
    monkeypatch.setattr(store, "replace", replace_late)
    assert hangs.wait(30)
    with pytest.raises(LockLost, match="another run may have taken it"):
        lock.check()


def test_failed_release_is_logged(
    take: Callable[..., Lock], store: Aged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    lock = take("first")
    with monkeypatch.context() as full:
        full.setattr(store, "delete", refuse)
        lock.close()
    assert "expires by itself: the disk is full" in caplog.text
    with pytest.raises(DestinationBusy):
        take("second")


def test_one_of_simultaneous_drivers_gets_the_lock(take: Callable[..., Lock]) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(6)

    def compete(number: int) -> None:
        barrier.wait()
        try:
            take(f"run {number}")
            outcomes.append("won")
        except DestinationBusy:
            outcomes.append("refused")

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 5 + ["won"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"holder": 7, "nonce": ""}', b"\xff"])
def test_damaged_lock_is_named_and_expires(
    take: Callable[..., Lock], store: Aged, tmp_path: Path, content: bytes
) -> None:
    store.replace(module.NAME, memoryview(content))
    with pytest.raises(DestinationBusy, match=f"{tmp_path}/{module.NAME} names the run .* is damaged"):
        take("next")
    store.added_s = LOCK_S + 1
    take("next")
    assert list(store.names()) == [module.NAME]


def test_dead_process_is_detected_on_the_same_machine_only() -> None:
    printed = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, check=True).stdout
    assert Holder(**json.loads(printed)).is_gone
    here = Holder.of_this_process("run")
    assert not here.is_gone
    assert replace(here, started=here.started - 1).is_gone, "its number is used again"
    assert not replace(here, machine="other", started=1).is_gone
