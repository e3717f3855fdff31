"""Connection options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import RunVerb

import graphkiln_client
from graphkiln.cli.connection import ConnectionOptions


def connect(url: str, **options: Any) -> None:
    """Connect and disconnect."""
    client = ConnectionOptions(url=url, **options).connect()
    if client is not None:
        client.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of all created clients."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(graphkiln_client, "Client", lambda url, **options: calls.append({"url": url, **options}))
    return calls


def test_arguments_of_the_client(made: list[dict[str, Any]], tmp_path: Path) -> None:
    connect("http://h:1")
    nothing = {"headers": {}, "ca_file": None, "client_cert": None, "client_key": None, "admin_key": ""}
    assert made.pop() == {"url": "http://h:1", "timeout_s": 30.0, **nothing}
    (tmp_path / "key").write_text("secret\n")
    files = {"ca_file": Path("ca.pem"), "client_cert": Path("c"), "client_key": Path("k")}
    headers = ["Authorization: Bearer a:b=c", "X-Empty:", " spaced :  text "]
    connect("grpcs://h:1", header=headers, timeout=2.5, admin_key_file=tmp_path / "key", **files)
    given = {"Authorization": "Bearer a:b=c", "X-Empty": "", "spaced": "text"}
    assert made == [{"url": "grpcs://h:1", "timeout_s": 2.5, "headers": given, "admin_key": "secret", **files}]


@pytest.mark.parametrize(
    "verb", ["bench", "classify", "detect", "embed", "segment", "health", "infer", "load", "models", "unload"]
)
def test_verbs_with_connection_options(run: RunVerb, verb: str) -> None:
    shown = run(verb, "--help").out
    for option in ("--url", "--header", "--ca-file", "--client-cert", "--client-key"):
        assert option in shown
    assert ("--admin-key-file" in shown) is (verb in {"health", "load", "models", "unload"})
    assert ("--timeout" in shown) is (verb not in {"health", "models"})
