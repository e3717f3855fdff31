"""Failed requests in the log: which, why, and how many at most."""

from __future__ import annotations

import json
import logging

import pytest
from fake_triton import InferenceRequest

from graphkiln_backend.graph.errors import ExecutionError, InvalidInput
from graphkiln_backend.triton import failures as module
from graphkiln_backend.triton.failures import FailureLog, request_prefix

ERROR = InvalidInput("no image", hint="send one")


def a_request(name: str) -> InferenceRequest:
    return InferenceRequest({}, request_id=name)


@pytest.fixture
def in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", "json")


@pytest.mark.usefixtures("in_json")
def test_a_failure_is_a_warning_with_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().tell(a_request("seven"), ERROR)
    FailureLog().tell(None, ERROR)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [vars(record)["request_id"] for record in caplog.records] == ["seven", ""]
    assert caplog.messages[0] == f"request failed: INVALID_ARG: {ERROR}"


@pytest.mark.parametrize("said", [None, "text"])
def test_a_log_for_people_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str | None
) -> None:
    monkeypatch.delenv("GRAPHKILN_LOG_FORMAT", raising=False)
    if said:
        monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", said)
    FailureLog().tell(a_request("seven"), ERROR)
    assert not caplog.records


@pytest.mark.usefixtures("in_json")
def test_a_flood_is_counted_and_the_next_second_says_how_long_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MOST_A_SECOND", 3)
    now = [100.0]
    log = FailureLog(lambda: now[0])
    for index in range(10):
        log.tell(a_request(str(index)), ERROR)
    assert [vars(record)["request_id"] for record in caplog.records] == ["0", "1", "2"]
    now[0] += 1
    log.tell(a_request("next"), ERROR)
    assert caplog.messages[3] == "7 more requests failed, which are not listed"
    assert vars(caplog.records[4])["request_id"] == "next"
    now[0] += 1
    log.tell(a_request("later"), ERROR)
    assert len(caplog.records) == 6


@pytest.mark.parametrize("name", ["seven", 'a"] forged', "line\nbreak", "\u2028"])
def test_no_id_can_end_its_prefix(name: str) -> None:
    prefix = request_prefix(name)
    assert prefix.isascii()
    assert "\n" not in prefix
    assert json.loads(prefix.removeprefix("[request id: ").removesuffix("] ")) == name


def test_a_request_without_a_name_has_no_prefix() -> None:
    assert request_prefix("") == ""


def test_all_are_counted_by_their_code_also_those_that_are_not_listed() -> None:
    log = FailureLog()
    for _ in range(60):
        log.tell(None, ERROR)
    log.tell(None, ExecutionError("the engine failed"))
    assert log.counts == {"INVALID_ARG": 60, "INTERNAL": 1}
