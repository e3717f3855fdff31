"""`graphkiln load` and `graphkiln unload`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commands import FakeClient, RunVerb

from graphkiln.cli.connection import ConnectionOptions
from graphkiln_client import ServedModel


def test_load_says_what_is_served_then(run: RunVerb, client: FakeClient) -> None:
    client.served = tuple(ServedModel(name=n, version="3", state="READY", reason="") for n in ("digits", "other"))
    assert run("load", "digits").out == "digits: version 3 ready\n"
    assert client.changed == [("load", "digits")]
    assert client.open == 0


def test_unload(run: RunVerb, client: FakeClient) -> None:
    assert run("unload", "digits").out == "digits: unloading\n"
    assert client.changed == [("unload", "digits")]


def test_the_options_reach_the_connection(run: RunVerb, client: FakeClient) -> None:
    for verb in ("load", "unload"):
        run(verb, "m", "--url", "grpcs://h", "--admin-key-file", "a", "--client-cert", "c", "--client-key", "k")
    expected = ConnectionOptions(
        url="grpcs://h", admin_key_file=Path("a"), client_cert=Path("c"), client_key=Path("k"), timeout=600.0
    )
    assert client.connected == [expected, replace(expected, timeout=30.0)]
