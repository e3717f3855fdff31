"""The pool of connections: which are kept, which are used again, and which way they go."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from canned import CannedHttp, http

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, ServerError
from graphkiln_client import Client
from graphkiln_client.runner import run
from graphkiln_client.transports import http_blocking
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.http_blocking import HttpTransport

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
    """Counts the connections that were ever opened, and can close the idle ones as servers do."""

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
    def test_one_thread_needs_one_connection(self, server: Counting, transport: HttpTransport) -> None:
        for _ in range(5):
            index(transport)
        assert server.opened == 1

    def test_threads_share_no_connection_at_the_same_time(self, server: Counting, transport: HttpTransport) -> None:
        slow = threading.Barrier(3)
        server._answers = [lambda connection: (slow.wait(5), connection.sendall(OK))]
        threads = [threading.Thread(target=index, args=(transport,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.opened == 3

    def test_no_more_idle_ones_than_allowed(
        self, server: Counting, transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_blocking, "_MAX_IDLE", 1)
        first = transport._open(Deadline.after(5))
        index(transport)
        wait_until(lambda: server.open_connections == 2)
        transport._exchange_on(first, transport.wire.repository_index().request, Deadline.after(5))
        wait_until(lambda: server.open_connections == 1)
        assert len(transport._idle) == 1

    def test_an_idle_connection_that_the_server_closed_is_replaced(
        self, server: Counting, transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_blocking, "_FRESH_S", 0)
        index(transport)
        server.drop_idle()
        assert index(transport) == []
        assert server.opened == 2

    def test_a_connection_that_was_used_just_now_is_not_polled(
        self, server: Counting, transport: HttpTransport
    ) -> None:
        """Where the server closed it meanwhile, that is a failure like any other: the client tries again."""
        index(transport)
        server.drop_idle()
        with pytest.raises(ConnectionFailed):
            index(transport)
        assert index(transport) == []

    def test_an_error_status_keeps_the_connection(self, server: Counting, transport: HttpTransport) -> None:
        server._answers = [http(b"{}", "500 Oh"), OK]
        with pytest.raises(ServerError):
            index(transport)
        index(transport)
        assert server.opened == 1

    def test_an_unread_response_does_not(self, server: Counting, transport: HttpTransport) -> None:
        server._answers = [lambda connection: connection.recv(1), OK]
        with pytest.raises(DeadlineExceeded):
            index(transport, 0.1)
        assert index(transport) == []
        assert server.opened == 2

    def test_closing_closes_the_idle_ones(self, server: Counting, transport: HttpTransport) -> None:
        index(transport)
        run(transport.close())
        wait_until(lambda: server.open_connections == 0)

    def test_what_is_under_way_at_the_close_is_closed_after_it(
        self, server: Counting, transport: HttpTransport
    ) -> None:
        run(transport.close())
        assert index(transport) == []
        wait_until(lambda: server.open_connections == 0)


class TestReaching:
    def test_nobody_listens(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            transport = open_transport(f"http://127.0.0.1:{held.getsockname()[1]}")
            with pytest.raises(ConnectionFailed, match=r"cannot reach http://127\.0\.0\.1") as caught:
                index(transport)
        assert "graphkiln health" in caught.value.hint

    def test_a_name_that_nobody_has(self) -> None:
        with pytest.raises(ConnectionFailed, match=r"cannot reach http://nowhere\.invalid:80"):
            index(open_transport("http://nowhere.invalid"))

    def test_a_server_that_never_accepts(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            transport = open_transport(f"http://127.0.0.1:{listener.getsockname()[1]}")
            with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
                index(transport, 0.2)

    def test_a_path_before_the_protocols_own(self, server: Counting) -> None:
        transport = open_transport(f"{server.url}/gateway/a")
        index(transport)
        run(transport.close())
        assert server.requests[0].startswith(b"POST /gateway/a/v2/repository/index HTTP/1.1\r\n")

    def test_the_host_header_has_the_port(self, server: Counting, transport: HttpTransport) -> None:
        index(transport)
        assert f"Host: 127.0.0.1:{server.port}\r\n".encode() in server.requests[0]

    def test_an_ipv6_server(self) -> None:
        try:
            listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("this machine has no IPv6")
        with Counting([OK]) as server:
            server._listener.shutdown(socket.SHUT_RDWR)  # ends its thread, which closing would not
            server._listener.close()
            server._listener = listener
            thread = threading.Thread(target=server._accept)
            server._threads.append(thread)
            thread.start()
            port = listener.getsockname()[1]
            transport = open_transport(f"http://[::1]:{port}")
            assert index(transport) == []
            run(transport.close())
            assert f"Host: [::1]:{port}\r\n".encode() in server.requests[0]


class TestProxies:
    def test_a_tunnel_for_https(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with CannedHttp([http(b"", "407 Proxy Authentication Required")]) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//me:pass@"))
            with pytest.raises(ConnectionFailed):
                index(open_transport("https://far.away:8443"))
            (request,) = proxy.requests
        assert request.startswith(b"CONNECT far.away:8443 HTTP/1.")
        assert b"Proxy-Authorization: Basic bWU6cGFzcw==" in request

    def test_other_headers_than_the_proxys_are_the_servers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with CannedHttp([OK]) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url)
            transport = HttpTransport(Endpoint.parse("http://far.away", {"X-Token": "t"}, None))
            index(transport)
            run(transport.close())
            (request,) = proxy.requests
        assert request.startswith(b"POST http://far.away:80/v2/repository/index HTTP/1.1\r\n")
        assert b"Host: far.away:80\r\n" in request
        assert b"X-Token: t\r\n" in request
        assert b"Proxy-Authorization" not in request

    @pytest.mark.parametrize("exception", ["far.away", "*", ".away"])
    def test_a_host_that_is_excepted(self, monkeypatch: pytest.MonkeyPatch, exception: str) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", exception)
        assert open_transport("http://far.away")._proxy is None

    def test_grpc_schemes_and_others_have_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        assert open_transport("http://far.away")._proxy is None


@pytest.mark.parametrize("timeout_s", [1e12, math.inf])
def test_one_may_wait_for_as_long_as_one_likes(timeout_s: float) -> None:
    with CannedHttp([OK]) as server, Client(server.url, timeout_s=timeout_s) as client:
        assert client.models() == ()


def test_compute_and_sleep_happen_in_the_callers_thread() -> None:
    transport = open_transport("http://127.0.0.1:9")
    assert run(transport.compute(threading.get_ident)) == threading.get_ident()
    begun = time.monotonic()
    run(transport.sleep(0.02))
    assert time.monotonic() - begun >= 0.02
