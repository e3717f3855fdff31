"""One HTTP connection: a pair of sockets, of which the test is the server."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Iterator

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.http_connection import HttpConnection, header_lines, seconds_left
from graphkiln_client.transports.http_wire import HttpRequest, HttpResponse

GET = HttpRequest(method="GET", path="/v2")
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kind: plain\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Kind: chunked\r\n\r\n"
CHUNKED += b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nT: t\r\n\r\n"


class Server:
    """The other end of a connection."""

    def __init__(self) -> None:
        client, self.sock = socket.socketpair()
        self.connection = HttpConnection(client, "/prefix", header_lines({"Host": "h", "User-Agent": "graphkiln"}))

    def exchange(
        self, *answers: bytes, request: HttpRequest = GET, timeout_s: float = 5, hang_up: bool = False
    ) -> tuple[HttpResponse, bool]:
        """Sends these pieces, one after the other, and reads the response to a request."""

        def serve() -> None:
            for answer in answers:
                self.sock.sendall(answer)
                time.sleep(0.001 if len(answers) > 1 else 0)
            if hang_up:
                self.sock.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return self.connection.exchange(request, Deadline.after(timeout_s))
        finally:
            thread.join()

    def received(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self.sock.recv(1 << 20)
        return data

    def close(self) -> None:
        self.connection.close()
        self.sock.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class TestResponses:
    @pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
    def test_a_response(self, server: Server, answer: bytes) -> None:
        response, reusable = server.exchange(answer)
        assert (response.status, response.body, reusable) == (200, b"hello", True)

    @pytest.mark.parametrize("answer", [PLAIN, CHUNKED], ids=["plain", "chunked"])
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_in_whatever_pieces_it_comes(self, answer: bytes, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=5)))
        pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        with contextlib.closing(Server()) as server:
            response, reusable = server.exchange(*pieces)
        assert (response.body, reusable) == (b"hello", True)
        assert response.headers.get("x-kind") == ("plain" if answer is PLAIN else "chunked")

    def test_headers_are_found_in_any_case(self, server: Server) -> None:
        response, _ = server.exchange(b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\nRETRY-after: 7\r\n\r\n")
        assert response.status == 429
        assert response.headers.get("Retry-After") == response.headers.get("retry-after") == "7"
        assert response.headers.get("X-Other") is None

    def test_no_content(self, server: Server) -> None:
        response, reusable = server.exchange(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (response.status, response.body, reusable) == (204, b"", True)

    def test_a_body_that_ends_with_the_connection(self, server: Server) -> None:
        response, reusable = server.exchange(b"HTTP/1.1 200 OK\r\n\r\nhello", hang_up=True)
        assert (response.body, reusable) == (b"hello", False)

    @pytest.mark.parametrize("header", [b"Connection: close\r\n", b"connection: Close\r\n"])
    def test_a_connection_that_the_server_ends(self, server: Server, header: bytes) -> None:
        _, reusable = server.exchange(PLAIN.replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n"))
        assert not reusable

    def test_http_1_0_does_not_keep_it(self, server: Server) -> None:
        _, reusable = server.exchange(PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert not reusable

    def test_one_after_the_other(self, server: Server) -> None:
        for _ in range(3):
            assert server.exchange(PLAIN)[0].body == b"hello"

    def test_a_second_response_is_dropped_and_so_is_the_connection(self, server: Server) -> None:
        response, reusable = server.exchange(PLAIN + PLAIN.replace(b"hello", b"other"))
        assert (response.body, reusable) == (b"hello", False)

    def test_a_compressed_body(self, server: Server) -> None:
        packed = gzip.compress(b"hello")
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
        assert server.exchange(head.encode() + packed)[0].body == b"hello"

    def test_a_body_that_is_not_what_it_says(self, server: Server) -> None:
        with pytest.raises(ProtocolError, match="decompressed as gzip"):
            server.exchange(PLAIN.replace(b"X-Kind: plain", b"Content-Encoding: gzip"))


class TestFailures:
    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 ", PLAIN[:-1], CHUNKED[:-4], PLAIN[:20]])
    def test_an_end_in_the_middle(self, server: Server, answer: bytes) -> None:
        with pytest.raises(EOFError):
            server.exchange(answer, hang_up=True)

    @pytest.mark.parametrize(
        "answer", [b"\x00\x01\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 banana\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]
    )
    def test_what_is_not_http(self, server: Server, answer: bytes) -> None:
        with pytest.raises(httptools.HttpParserError):
            server.exchange(answer)

    def test_silence(self, server: Server) -> None:
        begun = time.monotonic()
        with pytest.raises((TimeoutError, BlockingIOError)):
            server.exchange(timeout_s=0.1)
        assert time.monotonic() - begun < 20

    def test_a_deadline_is_for_all_pieces_together(self, server: Server) -> None:
        stop = threading.Event()

        def trickle() -> None:
            for byte in PLAIN:
                if stop.wait(0.05):
                    return
                server.sock.sendall(bytes([byte]))

        thread = threading.Thread(target=trickle)
        thread.start()
        begun = time.monotonic()
        with pytest.raises((TimeoutError, BlockingIOError)):
            server.connection.exchange(GET, Deadline.after(0.3))
        assert time.monotonic() - begun > 0.25
        stop.set()
        thread.join()

    def test_a_deadline_that_is_over_sends_nothing(self, server: Server) -> None:
        with pytest.raises(TimeoutError):
            server.connection.exchange(GET, Deadline.after(0))
        server.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.sock.recv(1)

    def test_a_server_that_does_not_read(self, server: Server) -> None:
        """A send waits for room in the other side's buffers, and not for ever."""
        request = HttpRequest(method="POST", path="/", body=(b"x" * (64 << 20),))
        with pytest.raises((TimeoutError, BlockingIOError)):
            server.connection.exchange(request, Deadline.after(0.2))


class TestRequests:
    def test_what_is_sent(self, server: Server) -> None:
        request = HttpRequest(method="POST", path="/x", body=(b"ab", memoryview(b"cd")), headers={"X-A": "b"})
        server.exchange(PLAIN, request=request)
        expected = (
            b"POST /prefix/x HTTP/1.1\r\nHost: h\r\nUser-Agent: graphkiln\r\nX-A: b\r\nContent-Length: 4\r\n\r\nabcd"
        )
        assert server.received(len(expected)) == expected

    def test_a_request_without_a_body_says_so(self, server: Server) -> None:
        server.exchange(PLAIN)
        assert server.sock.recv(1 << 16).endswith(b"Content-Length: 0\r\n\r\n")

    @pytest.mark.parametrize("size", [(1 << 16) - 2, 1 << 16, (1 << 16) + 1, 1 << 20])
    def test_bodies_of_every_size(self, server: Server, size: int) -> None:
        parts: list[bytes] = []
        reader = threading.Thread(target=lambda: parts.append(server.received(size)))
        reader.start()
        body = (b"a" * (size // 2), memoryview(b"b" * (size - size // 2)))
        server.exchange(PLAIN, request=HttpRequest(method="POST", path="/", body=body))
        reader.join()
        data = parts[0]
        head, _, received = data.partition(b"\r\n\r\n")
        missing = size - len(received)
        received += server.received(missing) if missing else b""
        assert f"Content-Length: {size}".encode() in head
        assert received == b"a" * (size // 2) + b"b" * (size - size // 2)


class TestIsQuiet:
    def test_an_idle_connection_is(self, server: Server) -> None:
        assert server.connection.is_quiet
        server.exchange(PLAIN)
        assert server.connection.is_quiet

    def test_one_that_the_server_closed_is_not(self, server: Server) -> None:
        server.sock.close()
        assert not server.connection.is_quiet

    def test_one_with_a_byte_too_many_is_not(self, server: Server) -> None:
        server.sock.sendall(b"x")
        assert not server.connection.is_quiet


def test_header_lines() -> None:
    assert header_lines({}) == ""
    assert header_lines({"A": "1", "B": "2"}) == "A: 1\r\nB: 2\r\n"


def test_seconds_left_are_never_none() -> None:
    assert 0 < seconds_left(Deadline.after(5)) <= 5
    with pytest.raises(TimeoutError):
        seconds_left(Deadline.after(0))
