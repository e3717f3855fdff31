"""The state of models, asked of a server over HTTP."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from canned import Answer, CannedHttp, hang_up, http, silence
from running import free_ports
from statuses import instance_status

from graphkiln_backend.server import repository_control as module
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.probe import ModelState, model_states, states_of_instances, with_refusals
from graphkiln_backend.server.repository_control import HttpControl
from graphkiln_backend.triton.instance_status import StatusFile


def control(port: int) -> HttpControl:
    return HttpControl(ListenAddress(protocol="HTTP", host="127.0.0.1", port=port))


def ask(answer: Answer, instances: Path) -> tuple[list[ModelState], list[bytes]]:
    """The states that a server tells, and what it was sent."""
    with CannedHttp([answer]) as server:
        states = model_states(control(server.port), instances)
        return states, server.requests


def cut_off(connection: socket.socket) -> None:
    """Sends the beginning of a response."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[")


def index(*rows: dict[str, Any]) -> Answer:
    return http(json.dumps(rows).encode())


def test_every_row_of_the_index_is_a_state(tmp_path: Path) -> None:
    trace = "\n\nAt:\n  /backends/graphkiln/model.py(97): _load\n"
    states, requests = ask(
        index(
            {"name": "a", "version": "1", "state": "READY"},
            {"name": "b", "version": "7", "state": "UNAVAILABLE", "reason": f"Internal: no\ngraph{trace}"},
        ),
        tmp_path,
    )
    assert states == [
        ModelState(model="a", version="1", state="READY", reason="", status=None),
        ModelState(model="b", version="7", state="UNAVAILABLE", reason="no graph", status=None),
    ]
    assert requests[0].startswith(b"POST /v2/repository/index HTTP/1.1\r\n")


def test_a_model_that_was_never_loaded_has_a_name_only(tmp_path: Path) -> None:
    ((state,), _) = ask(index({"name": "a"}), tmp_path)
    assert state == ModelState(model="a", version="", state="UNLOADED", reason="", status=None)


def test_an_empty_index_is_no_state(tmp_path: Path) -> None:
    assert ask(index(), tmp_path)[0] == []


def test_the_slowest_instance_stands_for_its_version(tmp_path: Path) -> None:
    fast, slow = instance_status(pid=1, load_ms=10), instance_status(pid=2, load_ms=90)
    other = instance_status(pid=3, version=4, load_ms=500)
    with (
        StatusFile(tmp_path, "m_0_0", slow),
        StatusFile(tmp_path, "m_0_1", fast),
        StatusFile(tmp_path, "m_0_2", other),
    ):
        states, _ = ask(
            index({"name": "m", "version": "3", "state": "READY"}, {"name": "n", "version": "3", "state": "READY"}),
            tmp_path,
        )
    assert [state.status for state in states] == [slow, None]


def test_without_an_index_the_instances_stand_for_their_versions(tmp_path: Path) -> None:
    fast, slow = instance_status(pid=1, load_ms=10), instance_status(pid=2, load_ms=90)
    other = instance_status(pid=3, model="n", load_ms=50)
    with StatusFile(tmp_path, "a", slow), StatusFile(tmp_path, "b", fast), StatusFile(tmp_path, "c", other):
        states = states_of_instances(tmp_path)
    assert {(state.model, state.version): state.status for state in states} == {("m", "3"): slow, ("n", "3"): other}
    assert {state.state for state in states} == {"READY"}
    assert states_of_instances(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (hang_up, "broke off its response"),
        (cut_off, "broke off its response"),
        (b"no http at all\r\n\r\n", "broke off its response"),
        (http(b'{"error": "restricted"}', "403 Forbidden"), "status 403 to /v2/repository/index"),
        (http(b"{}", "503 Service Unavailable"), "status 503"),
    ],
    ids=["hangs up", "truncated", "not HTTP", "restricted", "restarting"],
)
def test_a_server_that_does_not_list_its_models_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 20)
    with pytest.raises(OSError, match=message):
        ask(answer, tmp_path)


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError):
        model_states(control(free_ports(1)[0]), tmp_path)


def test_a_server_that_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.1)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(silence, tmp_path)
    assert time.monotonic() - begun < 15


def test_refusals_take_the_place_of_what_the_server_says() -> None:
    def state(version: str, name: str, reason: str = "") -> ModelState:
        return ModelState(model="m", version=version, state=name, reason=reason, status=None)

    listed = [
        state("1", "READY"),
        state("2", "UNAVAILABLE", "unloaded"),
        state("3", "UNLOADING"),
        state("10", "UNAVAILABLE", "no graph"),
    ]
    assert with_refusals(listed, {("m", "9"): "cut short", ("m", "3"): "crashed"}) == [
        state("1", "READY"),
        state("3", "REFUSED", "crashed"),
        state("9", "REFUSED", "cut short"),
        state("10", "UNAVAILABLE", "no graph"),
    ]
    assert with_refusals([], {}) == []
