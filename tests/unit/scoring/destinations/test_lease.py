"""Claims: one driver at a time, and none that is dead keeps the next one out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphkiln_backend.scoring.destinations import lease
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.lease import LEASE_S, Holder, StoreLease, claim
from graphkiln_backend.scoring.errors import ClaimLost, DestinationBusy, StoreError


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
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes this process look like one of another machine, whose life cannot be seen."""
    original = Holder.of_this_process

    def switch(on: bool) -> None:
        other = staticmethod(lambda run_id: replace(original(run_id), machine="other", host="far"))
        monkeypatch.setattr(Holder, "of_this_process", other if on else original)

    return switch


def claims(store: FolderStore) -> list[str]:
    return sorted(name for name in store.names() if name.startswith("_claim"))


def test_the_second_driver_is_told_who_writes(store: Aged) -> None:
    claim(store, "first")
    with pytest.raises(DestinationBusy, match=r"is being written by run first \(process \d+ on .*forgotten in \d+ s"):
        claim(store, "second")


def test_a_claim_that_was_released_is_free_at_once(store: Aged) -> None:
    held = claim(store, "first")
    held.release()
    held.release()
    held.renew()  # of a run that is over: nothing
    claim(store, "second")
    assert claims(store) == ["_claim.00000002.json"]


def test_a_process_that_is_gone_is_no_holder(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(store, "first")
    monkeypatch.setattr(lease, "is_gone", lambda _: True)
    claim(store, "second")


def test_a_holder_elsewhere_is_believed_for_its_time(store: Aged, elsewhere: Callable[[bool], None]) -> None:
    elsewhere(True)
    claim(store, "first")
    elsewhere(False)
    with pytest.raises(DestinationBusy, match="on far"):
        claim(store, "second")
    store.added_s = LEASE_S + 1
    claim(store, "second")


def age(held: StoreLease, seconds: float) -> None:
    held._renewed -= seconds


def test_renewing_makes_it_young(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    held = claim(store, "first")
    monkeypatch.setattr(store, "replace", lambda name, _: written.append(name))
    held.renew()
    assert written == []
    age(held, LEASE_S / 3)
    held.renew()
    held.renew()
    assert written == ["_claim.00000001.json"]


def test_who_was_taken_over_is_told_so(store: Aged, elsewhere: Callable[[bool], None]) -> None:
    elsewhere(True)
    held = claim(store, "first")
    elsewhere(False)
    store.added_s = LEASE_S + 1
    claim(store, "second")
    age(held, LEASE_S)
    with pytest.raises(ClaimLost, match="run second"):
        held.renew()
    held.release()  # of the lower number, which counts for nothing
    store.added_s = 0
    with pytest.raises(DestinationBusy, match="run second"):
        claim(store, "third")


def test_a_store_that_fails_for_a_while_is_asked_again(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreError("away", passing=True)

    held = claim(store, "first")
    monkeypatch.setattr(store, "replace", fail)
    age(held, LEASE_S / 2)
    held.renew()
    age(held, LEASE_S)
    with pytest.raises(StoreError, match="away"):
        held.renew()


def test_of_many_that_claim_at_once_one_does(store: Aged) -> None:
    claim(store, "before").release()
    outcomes: list[str] = []
    barrier = threading.Barrier(6)

    def take(number: int) -> None:
        barrier.wait()
        try:
            claim(store, f"run {number}")
            outcomes.append("won")
        except DestinationBusy:
            outcomes.append("refused")

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 5 + ["won"]


def test_who_stood_still_while_the_count_went_on_gives_way(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim(store, "first")
    first.release()
    original = store.create

    def slow(name: str, content: memoryview) -> bool:
        monkeypatch.setattr(store, "create", original)
        claim(store, "second").release()
        claim(store, "third")
        return original(name, content)

    monkeypatch.setattr(store, "create", slow)
    with pytest.raises(DestinationBusy, match="run third"):
        claim(store, "late")
    assert claims(store) == ["_claim.00000003.json"]


def test_a_claim_that_cannot_be_given_back_does_not_fail_the_run(
    store: Aged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = claim(store, "first")

    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(store, "replace", refuse)
        held.release()
    assert "could not be given back; it ends by itself: the disk is full" in caplog.text
    with pytest.raises(DestinationBusy):
        claim(store, "second")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"holder": {}}', b'{"holder": 7, "nonce": ""}', b"\xff"])
def test_a_damaged_claim_is_named_and_forgotten_in_time(store: Aged, tmp_path: Path, content: bytes) -> None:
    store.replace("_claim.00000003.json", memoryview(content))
    with pytest.raises(DestinationBusy) as raised:
        claim(store, "next")
    assert f"{tmp_path}/_claim.00000003.json says who writes there, but is damaged" in str(raised.value)
    assert "if no run writes there, it is forgotten in" in str(raised.value)
    store.added_s = LEASE_S + 1
    claim(store, "next").release()
    assert claims(store) == ["_claim.00000004.json"]


def test_who_holds_a_claim_that_was_damaged_writes_it_anew(store: Aged) -> None:
    held = claim(store, "first")
    store.replace("_claim.00000001.json", memoryview(b"{"))
    age(held, LEASE_S / 2)
    held.renew()
    with pytest.raises(DestinationBusy, match="run first"):
        claim(store, "second")


def test_a_damaged_claim_that_took_over_has_taken_over(store: Aged) -> None:
    held = claim(store, "first")
    store.replace("_claim.00000002.json", memoryview(b"{"))
    age(held, LEASE_S / 2)
    with pytest.raises(ClaimLost, match="another run took over"):
        held.renew()


def test_results_are_not_listed_to_renew_a_claim(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = store.names
    monkeypatch.setattr(store, "names", lambda prefix="": asked.append(prefix) or original(prefix))
    age(held := claim(store, "first"), LEASE_S / 2)
    held.renew()
    assert set(asked) == {"_claim."}
