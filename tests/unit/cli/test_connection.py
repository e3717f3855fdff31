"""The client that the options of the command line make."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import RunVerb

import graphkiln_client
from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln_backend.graph.errors import InvalidInput


def connect(url: str, **options: Any) -> None:
    """Connects, and closes the connection again."""
    client = ConnectionOptions(url=url, **options).connect()
    if client is not None:
        client.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every client that is made."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(graphkiln_client, "Client", lambda url, **options: calls.append({"url": url, **options}))
    return calls


def test_options_are_arguments_of_the_client(made: list[dict[str, Any]], tmp_path: Path) -> None:
    connect("http://h:1")
    nothing = {"headers": {}, "ca_file": None, "client_cert": None, "client_key": None, "admin_key": ""}
    assert made.pop() == {"url": "http://h:1", "timeout_s": 30.0, **nothing}
    (tmp_path / "key").write_text("secret\n")
    files = {"ca_file": Path("ca.pem"), "client_cert": Path("c"), "client_key": Path("k")}
    headers = ["Authorization: Bearer a:b=c", "X-Empty:", " spaced :  text "]
    connect("grpcs://h:1", header=headers, timeout=2.5, admin_key_file=tmp_path / "key", **files)
    given = {"Authorization": "Bearer a:b=c", "X-Empty": "", "spaced": "text"}
    assert made == [{"url": "grpcs://h:1", "timeout_s": 2.5, "headers": given, "admin_key": "secret", **files}]


@pytest.mark.parametrize("header", ["", "Authorization", "Authorization=Bearer"])
def test_a_header_without_a_colon(made: list[dict[str, Any]], header: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected NAME:TEXT.*Authorization: Bearer"):
        connect("http://h:1", header=["Good: one", header])
    assert made == []


def test_a_header_is_never_repeated_in_an_error() -> None:
    """It may be a secret."""
    with pytest.raises(InvalidInput) as raised:
        connect("http://h:1", header=["topsecret"])
    assert "topsecret" not in str(raised.value)


def test_mistakes(tmp_path: Path) -> None:
    for url in ("ftp://h:1", "http://"):
        with pytest.raises(InvalidInput):
            connect(url)
    with pytest.raises(InvalidInput, match=r"ca\.pem"):
        connect("https://h:1", ca_file=tmp_path / "ca.pem")


class TestWithConnection:
    def test_the_verb_gets_what_was_given(self) -> None:
        seen: list[object] = []

        @with_connection(timeout_s=7.0)
        def verb(name: str, connection: ConnectionOptions = DEFAULT_CONNECTION, wait: float = 1.0) -> None:
            seen.extend([name, connection, wait])

        given = {name: parameter.default for name, parameter in inspect.signature(verb).parameters.items()}
        assert list(given) == ["name", "url", "wait", "header", "ca_file", "client_cert", "client_key", "timeout"]
        assert given["timeout"] == 7.0
        verb(**{**given, "name": "a", "url": "grpc://h"})
        assert seen == ["a", ConnectionOptions(url="grpc://h", timeout=7.0), 1.0]

    def test_what_a_verb_has_no_use_for_is_not_offered(self) -> None:
        def verb(connection: ConnectionOptions = DEFAULT_CONNECTION) -> None:
            """Does nothing."""

        assert "timeout" not in inspect.signature(with_connection(timeout_s=None)(verb)).parameters
        assert "admin_key_file" in inspect.signature(with_connection(admin=True)(verb)).parameters
        assert with_connection()(verb).__doc__ == "Does nothing."


@pytest.mark.parametrize(
    "verb", ["bench", "classify", "detect", "embed", "segment", "health", "infer", "load", "models", "unload"]
)
def test_every_verb_that_talks_to_a_server_offers_them(run: RunVerb, verb: str) -> None:
    shown = run(verb, "--help").out
    for option in ("--url", "--header", "--ca-file", "--client-cert", "--client-key"):
        assert option in shown
    assert ("--admin-key-file" in shown) is (verb in {"health", "load", "models", "unload"})
    assert ("--timeout" in shown) is (verb not in {"health", "models"})


@pytest.mark.parametrize("option", ["ca_file", "client_cert", "client_key"])
def test_options_of_tls_for_a_connection_without_it(option: str, tmp_path: Path) -> None:
    """They would have no effect: what was meant to be secured would be sent in the clear."""
    options = replace(DEFAULT_CONNECTION, url="http://h:8000", **{option: tmp_path / "file"})
    with pytest.raises(InvalidInput, match=f"--{option.replace('_', '-')}: the connection to .* is not secured"):
        options.connect()
