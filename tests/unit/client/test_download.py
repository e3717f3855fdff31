"""Downloads: over HTTPS only, of bounded size, and every failure an error of ours."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from canned import CannedHttp, hang_up, http, silence, trickle

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_client import preparing as module
from graphkiln_client.preparing import download


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """Of a server that this process trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.delenv("https_proxy", raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def moved(location: str, status: str = "302 Found") -> bytes:
    return http(b"", status, f"Location: {location}")


def test_the_content(context: ssl.SSLContext) -> None:
    content = bytes(range(256)) * 1000
    with CannedHttp([http(content)], context=context) as server:
        assert download(f"{server.url}/a/b.png?c=d", 5) == content
        assert server.requests[0].startswith(b"GET /a/b.png?c=d HTTP/1.1\r\n")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed(context: ssl.SSLContext, status: str) -> None:
    with CannedHttp([moved("/there", status), http(b"content")], context=context) as server:
        assert download(f"{server.url}/here", 5) == b"content"
        assert [request.split(b" ")[1] for request in server.requests] == [b"/here", b"/there"]


def test_but_not_for_ever(context: ssl.SSLContext) -> None:
    with (
        CannedHttp([moved("/here")], context=context) as server,
        pytest.raises(InvalidInput, match=r"cannot fetch .*returned 302"),
    ):
        download(f"{server.url}/here", 5)


@pytest.mark.parametrize("location", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "gopher://x"])
def test_and_to_https_only(context: ssl.SSLContext, location: str) -> None:
    with (
        CannedHttp([moved(location)], context=context) as server,
        pytest.raises(InvalidInput, match=r"redirects to|returned 302"),
    ):
        download(f"{server.url}/here", 5)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "data:,x", "/etc/passwd", "", "HTTP://x"]
)
def test_other_urls_are_never_opened(url: str) -> None:
    with pytest.raises(InvalidInput, match="not an https:// URL"):
        download(url, 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 429, 500, 503])
def test_an_error_of_the_server(context: ssl.SSLContext, status: int) -> None:
    with CannedHttp([http(b"why", f"{status} Oh")], context=context) as server:
        with pytest.raises(InvalidInput, match=f"returned {status}") as caught:
            download(f"{server.url}/here", 5)
        assert caught.value.status == status
        assert len(server.requests) == 1


@pytest.mark.parametrize(("size", "fits"), [(99, True), (100, True), (101, False), (5000, False)])
def test_no_more_than_the_limit(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, size: int, fits: bool
) -> None:
    monkeypatch.setattr(module, "_DOWNLOAD_LIMIT", 100)
    with CannedHttp([http(b"x" * size)], context=context) as server:
        if fits:
            assert len(download(f"{server.url}/here", 5)) == size
        else:
            with pytest.raises(InvalidInput, match="is larger than"):
                download(f"{server.url}/here", 5)


@pytest.mark.parametrize(
    "answer", [hang_up, b"nonsense\r\n\r\n", lambda connection: connection.sendall(http(b"x", length=9))]
)
def test_a_connection_that_breaks(context: ssl.SSLContext, answer: Any) -> None:
    with (
        CannedHttp([answer], context=context) as server,
        pytest.raises(ConnectionFailed, match="cannot fetch https://127"),
    ):
        download(f"{server.url}/here", 5)


def test_a_server_that_says_nothing(context: ssl.SSLContext) -> None:
    with CannedHttp([silence], context=context) as server, pytest.raises(ConnectionFailed, match="timed out"):
        download(f"{server.url}/here", 0.2)


@pytest.mark.usefixtures("context")
def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionFailed, match="cannot fetch"):
        download("https://127.0.0.1:9/here", 5)


def test_a_server_that_sends_byte_after_byte(context: ssl.SSLContext) -> None:
    answer = trickle(http(bytes(1000)), 0.01)
    with CannedHttp([answer], context=context) as server, pytest.raises(DeadlineExceeded, match="did not come within"):
        download(f"{server.url}/x", 1)
