"""The process of the page: how it is configured, and that it serves."""

from __future__ import annotations

import ssl
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest
import trustme
from certificates import write
from running import free_ports

from graphkiln.page.launch import PageFacts, open_page, page_address
from graphkiln.page.process import configure, shown_server
from graphkiln_backend.server.flags import TritonFlags

FACTS = PageFacts(inner_url="http://127.0.0.1:9", url="http://127.0.0.1:8000", metrics_url="", stores=["/store"])


def test_it_never_uses_the_key_that_its_user_could_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_ADMIN_KEY", "found")
    for typed, sent in (("", "none"), ("typed", "typed")):
        client = shown_server(FACTS).connect(typed)
        assert client._connection.transport._endpoint.admin_key == sent  # type: ignore[attr-defined]


def test_connections_are_limited_and_plain_without_certificates() -> None:
    config = configure(FACTS)
    assert config.limit_concurrency == 256
    assert not config.is_ssl


def test_a_server_that_listens_everywhere_is_named_as_the_page_was() -> None:
    assert shown_server(replace(FACTS, everywhere=True)).url_for("192.0.2.7:8003") == "http://192.0.2.7:8000"


def test_client_certificates_are_required_where_the_server_requires_them(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = write(authority.issue_cert("127.0.0.1"), tmp_path, authority)
    config = configure(replace(FACTS, tls=files.words()))
    config.load()
    assert config.ssl is not None
    assert config.ssl.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.slow
def test_it_serves_and_ends_with_the_block() -> None:
    http, page = free_ports(2)
    flags = TritonFlags.parse([f"--http-port={http}"], {"http-port": True}, "127.0.0.1")
    url = f"http://127.0.0.1:{page}/"
    with open_page(page_address(f":{page}"), flags, flags, None, []), urllib.request.urlopen(url, timeout=60) as answer:
        assert b"<title>graphkiln</title>" in answer.read()
    with pytest.raises(URLError):
        urllib.request.urlopen(url, timeout=5)
