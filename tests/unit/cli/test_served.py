"""What `serve` says once its models are loaded, to a person and to a program."""

from __future__ import annotations

import logging

import pytest
from statuses import instance_status

from graphkiln.cli.serve import LoadDisplay, print_states, tell_states
from graphkiln_backend.server.flags import ListenAddress, TritonFlags
from graphkiln_backend.server.probe import ModelState

FLAGS = TritonFlags.parse(
    ["--http-port=1234", "--allow-grpc=false", "--allow-metrics=false"],
    dict.fromkeys(("http-port", "allow-grpc", "allow-metrics"), True),
)
PAGE = ListenAddress(protocol="page", host="127.0.0.1", port=8003)
STATES = [
    ModelState(model="digits", version="1", state="READY", reason="", status=instance_status()),
    ModelState(model="digits", version="2", state="UNAVAILABLE", reason="it is cut off", status=None),
]


@pytest.fixture
def display() -> LoadDisplay:
    return LoadDisplay(live=False)


def test_a_program_gets_an_event_for_each_version(display: LoadDisplay, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphkiln"):
        tell_states(STATES, FLAGS, display, secure=True, page=PAGE)
    first, second, third, fourth = caplog.records
    status = instance_status()
    assert vars(first)["model"] == vars(second)["model"] == "digits"
    assert first.getMessage().startswith(f"version 1 is ready: {status.engine} on {status.device}")
    assert (second.levelname, second.getMessage()) == ("ERROR", "version 2 is unavailable: it is cut off")
    assert third.getMessage() == "serving with TLS HTTP 127.0.0.1:1234"
    assert fourth.getMessage().startswith("page https://127.0.0.1:8003")


def test_a_program_is_told_that_there_is_nothing(display: LoadDisplay, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphkiln"):
        tell_states([], FLAGS, display, secure=False)
    assert [record.getMessage() for record in caplog.records] == ["no model is loaded", "serving HTTP 127.0.0.1:1234"]
    assert caplog.records[0].levelname == "WARNING"


def test_a_person_gets_a_table(display: LoadDisplay, capsys: pytest.CaptureFixture[str]) -> None:
    print_states(STATES, FLAGS, display, secure=False)
    table = capsys.readouterr().out
    assert instance_status().engine in table
    assert "digits 2: it is cut off" in table
    assert table.endswith("serving HTTP 127.0.0.1:1234\n")
