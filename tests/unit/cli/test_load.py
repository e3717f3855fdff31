"""`graphkiln load` and `graphkiln unload`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import FakeClient, RunVerb

from graphkiln.cli.connection import ConnectionOptions
from graphkiln_backend.graph.errors import ServerError
from graphkiln_client import ServedModel


def test_load_prints_served_versions(run: RunVerb, client: FakeClient) -> None:
    client.served = tuple(ServedModel(name=n, version="3", state="READY", reason="") for n in ("digits", "other"))
    assert run("load", "digits").out == "digits: version 3 ready\n"
    assert client.changed == [("load", "digits")]
    assert client.open == 0


def test_unload(run: RunVerb, client: FakeClient) -> None:
    client.served = (ServedModel(name="digits", version="1", state="READY", reason=""),)
    assert run("unload", "digits").out == "digits: unloading\n"
    assert client.changed == [("unload", "digits")]


def test_connection_options(run: RunVerb, client: FakeClient) -> None:
    client.served = (ServedModel(name="m", version="1", state="READY", reason=""),)
    for verb in ("load", "unload"):
        run(verb, "m", "--url", "grpcs://h", "--admin-key-file", "a", "--client-cert", "c", "--client-key", "k")
    expected = ConnectionOptions(
        url="grpcs://h", admin_key_file=Path("a"), client_cert=Path("c"), client_key=Path("k"), timeout=600.0
    )
    assert client.connected == [expected, replace(expected, timeout=30.0)]


def test_unload_of_unknown_model(run: RunVerb, client: FakeClient) -> None:
    client.served = (ServedModel(name="digits", version="1", state="READY", reason=""),)
    finished = run("unload", "digit")
    assert (finished.code, client.changed) == (2, [])
    assert "the server has no model 'digit' (did you mean 'digits'?)" in finished.err


@pytest.mark.parametrize(("model", "words"), [("digit", "did you mean 'digits'?"), ("digits", "it cannot be loaded")])
def test_load_that_fails(
    run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    def fail(_: str) -> None:
        raise ServerError("it cannot be loaded")

    client.served = (ServedModel(name="digits", version="1", state="READY", reason=""),)
    monkeypatch.setattr(client, "load", fail)
    finished = run("load", model)
    assert finished.code
    assert words in finished.err
