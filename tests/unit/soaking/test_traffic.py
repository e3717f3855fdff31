"""Verdicts on requests, and their counts."""

from __future__ import annotations

import http.client

import pytest

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded
from soaking import traffic as ledger_module
from soaking.traffic import Ledger, NoAnswer, WrongAnswer, judge


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (WrongAnswer("y is 3"), "wrong"),
        (NoAnswer("within 30 s"), "lost"),
        (DeadlineExceeded("30 s are over"), "lost"),
        (TimeoutError(), "lost"),
        (ConnectionFailed("no server", status="UNAVAILABLE"), "refused"),
        (http.client.HTTPException("HTTP 503"), "refused"),
        (ConnectionResetError(), "refused"),
    ],
)
def test_an_error_is_judged(error: Exception, verdict: str) -> None:
    assert judge(error)[0] == verdict


class Refused(Exception):
    """Like tritonclient's exception, whose status is a method."""

    def __init__(self, status: str) -> None:
        self._status = status

    def status(self) -> str:
        return self._status


def test_a_deadline_of_grpc_is_a_lost_request() -> None:
    assert judge(Refused("StatusCode.DEADLINE_EXCEEDED")) == ("lost", "gRPC StatusCode.DEADLINE_EXCEEDED")
    assert judge(Refused("StatusCode.UNAVAILABLE")) == ("refused", "gRPC UNAVAILABLE")


def test_outcomes_are_counted_by_sender() -> None:
    ledger = Ledger()
    for error in (None, None, WrongAnswer("no"), ConnectionResetError()):
        with ledger.request("a client"):
            if error:
                raise error
    assert ledger.counts() == {"a client": {"right": 2, "refused": 1, "wrong": 1}}
    assert [outcome.detail for outcome in ledger.failures("wrong")] == ["no"]


def test_a_request_that_never_returns_is_lost_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "DEADLINE_S", -1.0)
    monkeypatch.setattr(ledger_module, "GRACE_S", 0.0)
    ledger = Ledger()
    with ledger.request("a client"):
        ledger.give_up_on_overdue()
    assert ledger.counts() == {"a client": {"lost": 1}}


def test_an_interrupted_soak_is_not_an_outcome() -> None:
    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt), ledger.request("a client"):
        raise KeyboardInterrupt
