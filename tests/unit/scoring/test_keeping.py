"""A claim is kept while the driver waits in one call, and its loss stops what comes after."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from graphkiln_backend.scoring import run as keeping
from graphkiln_backend.scoring.errors import ClaimLost, StoreError
from graphkiln_backend.scoring.run import kept

PATIENCE_S = 60


@dataclass
class Held:
    """A lease that is lost after some renewals."""

    lost_after: int = 10**9
    renewals: int = 0
    renewed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def renew(self) -> None:
        self.renewals += 1
        self.renewed.release()
        if self.renewals > self.lost_after:
            raise ClaimLost("run second took over")

    def release(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        assert self.renewed.acquire(timeout=PATIENCE_S)

    def wait_for_loss(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "lease":
                thread.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_ASKED_S", 0.001)


def test_it_is_renewed_while_one_call_lasts_and_not_after() -> None:
    held = Held()
    with kept(held) as check:
        for _ in range(3):
            held.wait()  # the one call
        check()
    renewals = held.renewals
    assert renewals >= 3
    assert "lease" not in {thread.name for thread in threading.enumerate()}
    assert held.renewals == renewals


def test_a_claim_that_is_lost_meanwhile_stops_what_comes_next() -> None:
    held, done = Held(lost_after=1), []

    def work() -> None:
        with kept(held) as check:
            held.wait_for_loss()
            done.append("listed")
            check()
            done.append("removed")

    with pytest.raises(ClaimLost, match="run second"):
        work()
    assert done == ["listed"]


def test_one_that_was_lost_before_is_told_at_once() -> None:
    with pytest.raises(ClaimLost), kept(Held(lost_after=0)):
        raise AssertionError("the block")


def test_a_loss_that_nobody_asked_for_is_told_at_the_end() -> None:
    held = Held(lost_after=1)
    with pytest.raises(ClaimLost), kept(held):
        held.wait_for_loss()


def test_what_fails_meanwhile_is_told_first() -> None:
    held = Held(lost_after=1)

    def work() -> None:
        with kept(held):
            held.wait_for_loss()
            raise StoreError("away")

    with pytest.raises(StoreError, match="away"):
        work()
