"""`graphkiln health`, with and without `--wait`."""

from __future__ import annotations

import json

import pytest
from commands import FakeClient, RunVerb

from graphkiln.cli import models as verb
from graphkiln_backend.graph.errors import ConnectionFailed
from graphkiln_client import Health, ServedModel

READY = Health(live=True, ready=True, server="triton 2.51.0")
LOADING = Health(
    live=True,
    ready=False,
    server="triton 2.51.0",
    not_ready=(ServedModel(name="cats", version="1", state="LOADING", reason="in a minute"),),
)
SILENT = Health(live=True, ready=False)


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(verb, "time", fake)
    return fake


@pytest.mark.usefixtures("client")
def test_ready_server(run: RunVerb) -> None:
    finished = run("health")
    assert (finished.code, finished.out, finished.err) == (0, "ready\n", "")


@pytest.mark.parametrize(
    ("state", "words"),
    [(LOADING, "cats 1 is LOADING: in a minute"), (SILENT, "nowhere.test:8000 responds, but is not")],
)
def test_unready_server_gives_reasons(run: RunVerb, client: FakeClient, state: Health, words: str) -> None:
    client.healths = [state]
    finished = run("health")
    assert finished.code == 1
    assert finished.out == ""
    assert words in finished.err


def test_no_server(run: RunVerb, client: FakeClient) -> None:
    client.healths = [ConnectionFailed("no server at nowhere.test:8000")]
    finished = run("health")
    assert finished.code == 1
    assert finished.err == "graphkiln: no server at nowhere.test:8000\n"


def test_wait_until_ready(run: RunVerb, client: FakeClient, clock: Clock) -> None:
    client.healths = [ConnectionFailed("not yet"), ConnectionFailed("not yet"), LOADING, READY]
    assert run("health", "--wait", "10").out == "ready\n"
    assert clock.slept == 3


@pytest.mark.parametrize(("words", "seconds"), [([], 0), (["--wait", "2"], 2)])
def test_wait_is_limited(run: RunVerb, client: FakeClient, clock: Clock, words: list[str], seconds: float) -> None:
    client.healths = [LOADING]
    assert run("health", *words).code == 1
    assert clock.now == pytest.approx(100 + seconds, abs=0.06)


@pytest.mark.parametrize(("words", "timeout_s"), [([], 5), (["--wait", "2"], 2), (["--wait", "60"], 5)])
def test_request_timeout_is_limited_by_the_wait(
    run: RunVerb, client: FakeClient, words: list[str], timeout_s: float
) -> None:
    run("health", *words)
    assert client.connected[0].timeout == timeout_s


def test_json_has_state_and_reasons(run: RunVerb, client: FakeClient) -> None:
    client.healths = [LOADING]
    finished = run("health", "--json")
    assert finished.code == 1
    assert json.loads(finished.out)["not_ready"] == [
        {"name": "cats", "version": "1", "state": "LOADING", "reason": "in a minute"}
    ]
    client.healths = [READY]
    finished = run("health", "--json")
    assert (finished.code, json.loads(finished.out)["ready"]) == (0, True)
