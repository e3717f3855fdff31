"""The connection pool of the blocking HTTP transport."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from canned import CannedHttp, http
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded
from graphkiln_client import Client
from graphkiln_client.client import run
from graphkiln_client.transports import http_blocking
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.http_blocking import HttpConnection, HttpTransport
from graphkiln_client.transports.http_wire import HttpRequest

OK = http(b"[]")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def open_transport(url: str) -> HttpTransport:
    return HttpTransport(Endpoint.parse(url, {}, None))


def index(transport: HttpTransport, timeout_s: float = 5) -> Any:
    return run(transport.send(transport.wire.repository_index(), Deadline.after(timeout_s)))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


class Counting(CannedHttp):
    """Counts opened connections, and can close idle ones."""

    opened = 0

    def _serve(self, plain: socket.socket) -> None:
        self.opened += 1
        super()._serve(plain)

    def drop_idle(self) -> None:
        for connection in list(self._connections):
            connection.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: self.open_connections == 0)


@pytest.fixture
def server() -> Iterator[Counting]:
    with Counting([OK]) as server:
        yield server


@pytest.fixture
def transport(server: Counting) -> Iterator[HttpTransport]:
    transport = open_transport(server.url)
    yield transport
    run(transport.close())


class TestPool:
    def test_connection_is_reused(self, server: Counting, transport: HttpTransport) -> None:
        for _ in range(5):
            index(transport)
        assert server.opened == 1

    def test_threads_use_separate_connections(self, server: Counting, transport: HttpTransport) -> None:
        slow = threading.Barrier(3)
        server._answers = [lambda connection: (slow.wait(5), connection.sendall(OK))]
        threads = [threading.Thread(target=index, args=(transport,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.opened == 3

    def test_closed_idle_connection_is_replaced(
        self, server: Counting, transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_blocking, "_FRESH_S", 0)
        index(transport)
        server.drop_idle()
        assert index(transport) == []
        assert server.opened == 2

    def test_connection_after_deadline_is_not_reused(self, server: Counting, transport: HttpTransport) -> None:
        server._answers = [lambda connection: connection.recv(1), OK]
        with pytest.raises(DeadlineExceeded):
            index(transport, 0.1)
        assert index(transport) == []
        assert server.opened == 2

    def test_close_closes_idle_connections(self, server: Counting, transport: HttpTransport) -> None:
        index(transport)
        run(transport.close())
        wait_until(lambda: server.open_connections == 0)


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: plain\r\n\r\n[]"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + PLAIN
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[\r\n1;x=y\r\n]\r\n0\r\nT: t\r\n\r\n"


class TestResponses:
    @pytest.mark.parametrize("answer", [PLAIN, CHUNKED, INTERIM], ids=["plain", "chunked", "after an interim response"])
    @settings(max_examples=5, deadline=None)
    @given(data=st.data())
    def test_response_in_pieces(self, answer: bytes, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=5)))
        pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]

        def send(connection: Any) -> None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.001)

        with CannedHttp([send]) as server, Client(server.url) as client:
            assert [client.models() for _ in range(2)] == [(), ()]

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 200 OK\r\n\r\n[]", PLAIN.replace(b"X-Kind: plain", b"Connection: close")]
    )
    def test_connection_closed_after_response(self, server: Counting, answer: bytes) -> None:
        def send(connection: Any) -> None:
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_RDWR)

        server._answers = [send]
        transport = open_transport(server.url)
        assert [index(transport) for _ in range(2)] == [[], []]
        assert server.opened == 2

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 ", PLAIN[:-1], CHUNKED[:-4], PLAIN[:20]])
    def test_truncated_response(self, server: Counting, transport: HttpTransport, answer: bytes) -> None:
        def send(connection: Any) -> None:
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_RDWR)

        server._answers = [send]
        with pytest.raises(ConnectionFailed, match="closed the connection"):
            index(transport)


class TestRequests:
    def test_send_timeout(self) -> None:
        near, far = socket.socketpair()
        connection = HttpConnection(near, "", "")
        request = HttpRequest(method="POST", path="/", body=(b"x" * (64 << 20),))
        with far, contextlib.closing(connection), pytest.raises(TimeoutError):
            connection.exchange(request, Deadline.after(0.2))

    @pytest.mark.parametrize("size", [(1 << 16) - 2, 1 << 16, (1 << 16) + 1, 1 << 20])
    def test_body_sizes(self, server: Counting, transport: HttpTransport, size: int) -> None:
        connection = transport._open(Deadline.after(5))
        body = (b"a" * (size // 2), memoryview(b"b" * (size - size // 2)))
        connection.exchange(HttpRequest(method="POST", path="/x", body=body), Deadline.after(5))
        connection.close()
        head, _, received = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /x HTTP/1.1\r\n")
        assert f"Content-Length: {size}".encode() in head
        assert received == b"".join(body)


class TestReaching:
    def test_connect_timeout(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            transport = open_transport(f"http://127.0.0.1:{listener.getsockname()[1]}")
            with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
                index(transport, 0.2)


class TestProxies:
    def test_https_proxy_tunnel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with CannedHttp([http(b"", "407 Proxy Authentication Required")]) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//me:pass@"))
            with pytest.raises(ConnectionFailed):
                index(open_transport("https://far.away:8443"))
            (request,) = proxy.requests
        assert request.startswith(b"CONNECT far.away:8443 HTTP/1.")
        assert b"Proxy-Authorization: Basic bWU6cGFzcw==" in request

    @pytest.mark.parametrize("exception", ["far.away", "*", ".away"])
    def test_no_proxy_host(self, monkeypatch: pytest.MonkeyPatch, exception: str) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", exception)
        assert open_transport("http://far.away")._proxy is None


@pytest.mark.parametrize("timeout_s", [1e12, math.inf])
def test_very_long_timeout(timeout_s: float) -> None:
    with CannedHttp([OK]) as server, Client(server.url, timeout_s=timeout_s) as client:
        assert client.models() == ()
