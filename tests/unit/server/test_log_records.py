"""Lines of a service's log as JSON: Triton's, its instances', the supervisor's, and what nobody formatted."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.text import request_prefix
from graphkiln_backend.server.log import LogRecord, of_event, of_line

SHORT = "W1123 08:46:10.123456 4711 model.py:29] "
ISO = "2026-11-23T08:46:10Z E 4711 server.cc:604] "


def test_a_line_of_triton() -> None:
    assert of_line(ISO + json.dumps("no port\n\tis free")) == LogRecord(
        message="no port", details="\tis free", level="error", source="triton", location="server.cc:604"
    )


def test_a_line_of_triton_that_is_not_escaped() -> None:
    assert of_line(SHORT + "plain text").message == "plain text"
    assert of_line(SHORT + "17").message == "17"
    assert of_line(SHORT).message == ""


@pytest.mark.parametrize(
    ("letter", "level"), [("I", "info"), ("W", "warning"), ("E", "error"), ("F", "critical"), ("V", "debug")]
)
def test_levels(letter: str, level: str) -> None:
    assert of_line(letter + SHORT[1:] + '"x"').level == level


def test_the_request_that_triton_names() -> None:
    record = of_line(SHORT + json.dumps("[request id: seven] cannot be queued"))
    assert (record.request_id, record.message, record.source) == ("seven", "cannot be queued", "triton")
    assert of_line(SHORT + json.dumps("[request id: <id_unknown>] x")).request_id == ""


def test_a_line_of_an_instance_and_its_traceback() -> None:
    said = "graphkiln: digits: " + request_prefix('odd"] id') + "a request failed\nTraceback\n  File"
    assert of_line(SHORT + json.dumps(said)) == LogRecord(
        message="a request failed", details="Traceback\n  File", level="warning", model="digits", request_id='odd"] id'
    )


@given(name=st.text(min_size=1), message=st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))
def test_any_id_comes_back_and_forges_nothing(name: str, message: str) -> None:
    read = of_line(SHORT + json.dumps(f"graphkiln: m: {request_prefix(name)}{message}"))
    assert (read.request_id, read.message, read.model) == (name, message, "m")


def test_a_message_of_an_instance_that_only_looks_like_one_about_a_request() -> None:
    record = of_line(SHORT + json.dumps('graphkiln: digits: expected [request id: "x"] nowhere'))
    assert (record.request_id, record.message) == ("", 'expected [request id: "x"] nowhere')


def test_lines_of_the_command_itself_and_of_nobody() -> None:
    assert of_line("graphkiln: port 8000 is in use") == LogRecord(message="port 8000 is in use")
    assert of_line("Segmentation fault") == LogRecord(message="Segmentation fault", level="warning", source="other")
    assert of_line("X1123 08:46:10.123456 4711 a.cc:1] x").source == "other"


def test_an_event_of_a_logger() -> None:
    record = logging.LogRecord("graphkiln.server", logging.ERROR, "f", 1, "%d of\n%d", (1, 2), None)
    vars(record).update(model="m", request_id="r")
    assert of_event(record) == LogRecord(message="1 of", details="2", level="error", model="m", request_id="r")


def test_an_event_with_a_traceback() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        record = logging.LogRecord("graphkiln", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    read = of_event(record)
    assert read.message == "failed"
    assert read.details.startswith("Traceback")
    assert read.details.endswith("ZeroDivisionError: division by zero")


def test_json_has_what_there_is_on_one_line() -> None:
    now = datetime(2026, 11, 23, 8, 46, 10, 123456, UTC)
    line = LogRecord(message="\u2028 \x1b[31m", request_id="r", details="a\nb").to_json(now)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {
        "time": "2026-11-23T08:46:10.123Z",
        "level": "info",
        "source": "graphkiln",
        "message": "\u2028 \x1b[31m",
        "request_id": "r",
        "details": "a\nb",
    }
