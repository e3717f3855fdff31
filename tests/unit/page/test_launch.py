"""Address and arguments of the page's process."""

from __future__ import annotations

import logging
import socket
import ssl
import urllib.request
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest
import trustme
from certificates import write
from running import free_ports

from graphkiln.page import launch
from graphkiln.page.app import configure, shown_server
from graphkiln.page.launch import (
    PageFacts,
    chosen_address,
    facts_of,
    is_address,
    open_page,
    page_address,
    page_name,
    page_url,
    with_quantiles,
)
from graphkiln_backend.graph.errors import EngineUnavailable, ServerSetupError
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.tls import TlsFiles

KNOWN = dict.fromkeys(("http-port", "http-address", "allow-http", "allow-metrics", "metrics-config"), True)
FILES = TlsFiles(certificate=Path("/c"), key=Path("/k"))


def flags(*arguments: str, host: str = "127.0.0.1") -> TritonFlags:
    return TritonFlags.parse(arguments, KNOWN, host)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", 8003),
        ("0.0.0.0", "0.0.0.0", 8003),
        (":9000", "127.0.0.1", 9000),
        ("localhost:9000", "localhost", 9000),
        ("[::1]:9000", "::1", 9000),
        ("::1", "::1", 8003),
        ("::", "::", 8003),
        ("127.0.0.1:", "127.0.0.1", 8003),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = page_address(text)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    "text", ["localhost:x", "localhost:99999", "http://localhost", "a/b", "me@localhost", "[::1", ":0"]
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(ServerSetupError, match="not a valid page address"):
        page_address(text)


@pytest.mark.parametrize(
    "word", [":9000", "0.0.0.0:9000", "[::1]:9000", "a.example:9000", "0.0.0.0", "::", "localhost"]
)
def test_addresses_as_option_value(word: str) -> None:
    assert is_address(word)


@pytest.mark.parametrize("word", ["models", "1", "-v", "models:x", "a/b:1", "--http-port", "٣:٣", "https://a:1"])
def test_not_addresses(word: str) -> None:
    assert not is_address(word)


def test_chosen_address() -> None:
    assert chosen_address("", [], wanted=False) is None
    for option, words, url in (("", [], ":8003"), ("127.0.0.1:1", [], ":1"), ("", [":2"], ":2")):
        chosen = chosen_address(option, words, wanted=not words)
        assert chosen
        assert page_url(chosen, secure=False).endswith(url)
    with pytest.raises(ServerSetupError, match="expected one page address"):
        chosen_address("a:1", [":2"], wanted=True)


def test_host_variable_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.HOST_VARIABLE, "0.0.0.0")
    for text, host, port in (("", "0.0.0.0", 8003), (":9000", "0.0.0.0", 9000), ("127.0.0.1", "127.0.0.1", 8003)):
        address = page_address(text)
        assert (address.host, address.port) == (host, port)
    monkeypatch.setenv(launch.HOST_VARIABLE, "::")
    assert (page_address(":9000").host, page_address(":9000").port) == ("::", 9000)


@pytest.mark.parametrize("name", ["", "http://a", "a:8003", "*.a", "-a", "a b", "ä"])
def test_invalid_names(name: str) -> None:
    for valid in ("models.example", "a_b.c-d."):
        assert page_name(valid) == valid
    with pytest.raises(ServerSetupError, match="not a host name"):
        page_name(name)


def test_quantiles_are_enabled() -> None:
    assert with_quantiles(flags()).arguments == ("--metrics-config=summary_latencies=true",)
    for given in ("--metrics-config=summary_latencies=false", "--allow-metrics=false"):
        assert with_quantiles(flags(given)) == flags(given)


def test_page_facts() -> None:
    public, inner = flags(host="0.0.0.0"), flags("--http-port=9999")
    facts = facts_of(page_address("models.example"), public, inner, FILES, [Path("/store")], names=["other.example"])
    assert facts.inner_url == "http://127.0.0.1:9999"
    assert facts.url == "https://127.0.0.1:8000"
    assert facts.metrics_url == "http://127.0.0.1:8002/metrics"
    assert (facts.stores, facts.tls) == (["/store"], ("/c", "/k", ""))
    assert facts.names == ["models.example", "other.example"]
    assert facts.everywhere
    assert not facts_of(page_address(""), inner, inner, None, []).everywhere
    assert not facts_of(page_address(""), public, flags("--allow-metrics=false"), None, []).metrics_url


def test_server_without_http() -> None:
    off = flags("--allow-http=false")
    with pytest.raises(ServerSetupError, match="HTTP port"):
        open_page(page_address(""), off, off, None, [])


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln_backend.graph.modules.find_spec", lambda _: None)
    with pytest.raises(EngineUnavailable, match="starlette, uvicorn") as raised:
        open_page(page_address(""), flags(), flags(), None, [])
    assert raised.value.extra == "page"


@pytest.mark.parametrize(
    ("host", "page"), [("127.0.0.1", "localhost:8000"), ("0.0.0.0", ":8000"), ("127.0.0.1", "0.0.0.0:8000")]
)
def test_server_port_is_refused(host: str, page: str) -> None:
    with pytest.raises(ServerSetupError, match=r"port 8000 is the server's own \(HTTP\)") as raised:
        open_page(page_address(page), flags(host=host), flags(), None, [])
    assert page_address(raised.value.hint.partition("--page-address=")[2]).port != 8000


def test_port_in_use_suggests_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = page_address(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ServerSetupError, match=r"\(page\): Address already in use") as raised:
            open_page(address, flags(), flags(), None, [])
    assert "choose another: --page-address=127.0.0.1:" in raised.value.hint


@pytest.mark.parametrize(
    ("page", "tls", "is_warned"),
    [("0.0.0.0:9", None, True), ("[::]:9", None, True), (":9", None, False), ("0.0.0.0:9", FILES, False)],
)
def test_open_page_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, page: str, tls: TlsFiles | None, is_warned: bool
) -> None:
    monkeypatch.setattr(launch, "ListeningChild", lambda *_: nullcontext())
    with caplog.at_level(logging.WARNING, "graphkiln.page"):
        open_page(page_address(page), flags(), flags(), tls, [])
        assert ("is not encrypted" in caplog.text) == is_warned
        caplog.clear()
        monkeypatch.setenv(launch.HOST_VARIABLE, page_address(page).host)
        open_page(page_address(page), flags(), flags(), tls, [])
    assert not caplog.text, "an image's own host"


FACTS = PageFacts(inner_url="http://127.0.0.1:9", url="http://127.0.0.1:8000", metrics_url="", stores=["/store"])


def test_page_does_not_use_local_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_ADMIN_KEY", "found")
    for typed, sent in (("", "none"), ("typed", "typed")):
        client = shown_server(FACTS).connect(typed)
        assert client._connection.transport._endpoint.admin_key == sent  # type: ignore[attr-defined]


def test_connection_limit_and_plain_http() -> None:
    config = configure(FACTS)
    assert config.limit_concurrency == 256
    assert not config.is_ssl


def test_client_certificates_are_required(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = write(authority.issue_cert("127.0.0.1"), tmp_path, authority)
    config = configure(replace(FACTS, tls=files.words()))
    config.load()
    assert config.ssl is not None
    assert config.ssl.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.slow
def test_page_serves_and_ends() -> None:
    http, page = free_ports(2)
    flags = TritonFlags.parse([f"--http-port={http}"], {"http-port": True}, "127.0.0.1")
    url = f"http://127.0.0.1:{page}/"
    with open_page(page_address(f":{page}"), flags, flags, None, []), urllib.request.urlopen(url, timeout=60) as answer:
        assert b"<title>graphkiln</title>" in answer.read()
    with pytest.raises(URLError):
        urllib.request.urlopen(url, timeout=5)
