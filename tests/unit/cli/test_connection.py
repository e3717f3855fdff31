"""The client that the options of the command line make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphkiln_client
from graphkiln.cli.connection import connect
from graphkiln_backend.graph.errors import InvalidInput


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every client that is made."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(graphkiln_client, "Client", lambda url, **options: calls.append({"url": url, **options}))
    return calls


def test_without_options(made: list[dict[str, Any]]) -> None:
    connect("http://h:1", None, None)
    nothing = {"headers": {}, "ca_file": None, "client_cert": None, "client_key": None, "admin_key": ""}
    assert made == [{"url": "http://h:1", "timeout_s": 30.0, **nothing}]


def test_with_all_of_them(made: list[dict[str, Any]]) -> None:
    connect("grpcs://h:1", ["Authorization: Bearer a:b=c", "X-Empty:", " spaced :  text "], Path("ca.pem"), 2.5)
    assert made[0]["headers"] == {"Authorization": "Bearer a:b=c", "X-Empty": "", "spaced": "text"}
    assert (made[0]["ca_file"], made[0]["timeout_s"]) == (Path("ca.pem"), 2.5)


def test_certificate_and_admin_key(made: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    connect("http://h:1", None, None, client_cert=Path("c"), client_key=Path("k"), admin_key_file=tmp_path / "key")
    assert (made[0]["client_cert"], made[0]["client_key"], made[0]["admin_key"]) == (Path("c"), Path("k"), "secret")


@pytest.mark.parametrize("header", ["", "Authorization", "Authorization=Bearer"])
def test_a_header_without_a_colon(made: list[dict[str, Any]], header: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected NAME:TEXT.*Authorization: Bearer"):
        connect("http://h:1", ["Good: one", header], None)
    assert made == []


def test_a_header_is_never_repeated_in_an_error() -> None:
    """It may be a secret."""
    with pytest.raises(InvalidInput) as raised:
        connect("http://h:1", ["topsecret"], None)
    assert "topsecret" not in str(raised.value)


@pytest.mark.parametrize("url", ["ftp://h:1", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InvalidInput):
        connect(url, None, None)


def test_a_missing_ca_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ca\.pem"):
        connect("https://h:1", None, tmp_path / "ca.pem").close()
