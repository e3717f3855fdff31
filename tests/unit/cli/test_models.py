"""`graphkiln models`: a table or JSON, and an exit code for scripts."""

from __future__ import annotations

import json

import pytest
from commands import FakeClient, RunVerb

from graphkiln.cli.connection import ConnectionOptions
from graphkiln_client import ServedModel

READY = ServedModel(name="digits", version="2", state="READY", reason="")
FAILED = ServedModel(name="cats", version="1", state="UNAVAILABLE", reason="[/bold] no such file")
NEVER = ServedModel(name="dogs", version="", state="", reason="")


def test_table_has_a_row_per_model(run: RunVerb, client: FakeClient) -> None:
    client.served = (READY, FAILED, NEVER)
    finished = run("models")
    rows = [line for line in finished.out.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["digits", "cats", "dogs"]
    assert "[/bold] no such file" in finished.out  # text of a server is no markup
    assert "not loaded" in rows[2]
    assert client.open == 0


@pytest.mark.parametrize(("served", "code"), [((READY,), 0), ((READY, FAILED), 1), ((NEVER,), 1), ((), 0)])
def test_exit_code(run: RunVerb, client: FakeClient, served: tuple[ServedModel, ...], code: int) -> None:
    client.served = served
    assert run("models").code == code
    assert run("models", "--json").code == code


def test_server_without_models(run: RunVerb, client: FakeClient) -> None:
    client.served = ()
    assert run("models").out == "the server has no models\n"
    assert json.loads(run("models", "--json").out) == []


def test_json_has_all_fields(run: RunVerb, client: FakeClient) -> None:
    client.served = (FAILED,)
    assert json.loads(run("models", "--json").out) == [
        {"name": "cats", "version": "1", "state": "UNAVAILABLE", "reason": "[/bold] no such file"}
    ]


def test_long_reason_is_wrapped(run: RunVerb, client: FakeClient) -> None:
    client.served = (ServedModel(name="n" * 30, version="1", state="UNAVAILABLE", reason="no room left " * 40),)
    lines = run("models").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("no room left") for line in lines) >= 1


def test_options_reach_the_connection(run: RunVerb, client: FakeClient) -> None:
    run("models", "--url", "grpc://there:8001", "--header", "A: b", "--header", "C:d")
    assert client.connected == [ConnectionOptions(url="grpc://there:8001", header=["A: b", "C:d"])]


def test_admin_key_file_of_the_connection(run: RunVerb, client: FakeClient) -> None:
    for verb in ("models", "health"):
        run(verb, "--admin-key-file", "key")
    assert [str(options.admin_key_file) for options in client.connected] == ["key", "key"]


def test_url_from_the_environment(run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_URL", "http://elsewhere:9")
    run("models")
    assert client.connected[0].url == "http://elsewhere:9"
