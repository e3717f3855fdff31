"""One HTTP/1.1 connection: a socket, a deadline for the whole response, and a parser (httptools: llhttp, in C)."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import httptools

from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.http_wire import HttpRequest, HttpResponse, decompress
from graphkiln_client.transports.limits import HEAD_LIMIT, BoundedBody, too_large

_NEARLY_S = 0.01
_TIMEVAL = struct.Struct("@ll")
_RECEIVED_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16  # up to here one copy is cheaper than one more system call


@dataclass(slots=True)
class HttpConnection:
    """An open connection, used by one thread at a time.

    Attributes:
        sock: The connected socket.
        prefix: What every request's path begins with.
        headers: Header lines of every request.
        timeout_s: The socket's timeout.
        idle_since: When its last response was complete, on the clock of `time.monotonic()`.
    """

    sock: socket.socket
    prefix: str
    headers: str
    timeout_s: float = math.inf
    idle_since: float = 0.0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come since the last response: neither the connection's end nor a byte too many."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, request: HttpRequest, deadline: Deadline) -> tuple[HttpResponse, bool]:
        """Sends a request and reads its response.

        Returns:
            The response, and whether the connection can be used again.

        Raises:
            OSError: The connection broke, or the time was over.
            EOFError: The server closed it before the response was complete.
            httptools.HttpParserError: The response is not HTTP.
            ProtocolError: The response is too large, or cannot be decompressed.
        """
        self._send(request, deadline)
        parser = _ResponseParser(request.limit_bytes)
        while not parser.is_complete:
            self._limit(deadline)  # a socket's timeout is for one read, a deadline for all of them
            data = self.sock.recv(_RECEIVED_BYTES)
            if not data:
                parser.end()
                break
            parser.feed(data)
        encoding = parser.headers.get("content-encoding") or ""
        body = decompress(parser.body.content(), encoding, request.limit_bytes)
        return HttpResponse(status=parser.status, headers=parser.headers, body=body), parser.is_reusable

    def _send(self, request: HttpRequest, deadline: Deadline) -> None:
        size = sum([len(part) for part in request.body])
        own = header_lines(request.headers)
        head = f"{request.method} {self.prefix}{request.path} HTTP/1.1\r\n{self.headers}{own}Content-Length: {size}"
        encoded = f"{head}\r\n\r\n".encode("ascii")
        self._limit(deadline)
        if size <= _JOINED_BYTES:
            self.sock.sendall(b"".join((encoded, *request.body)))
            return
        self.sock.sendall(encoded)
        for part in request.body:
            self._limit(deadline)
            self.sock.sendall(part)

    def _limit(self, deadline: Deadline) -> None:
        """Sets the socket's timeout where it is not nearly right already.

        The kernel's own timeouts: Python's would ask whether the socket is ready before each call, which is a system
        call more, and costs as much as the call. TLS cannot do without.
        """
        left_s = seconds_left(deadline)
        if abs(left_s - self.timeout_s) <= _NEARLY_S:
            return
        self.timeout_s = left_s
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.settimeout(left_s)
            return
        seconds, rest = divmod(left_s, 1)
        timeval = _TIMEVAL.pack(int(seconds), int(rest * 1e6) or 1)
        self.sock.setblocking(True)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def header_lines(headers: Mapping[str, str]) -> str:
    """Header lines. Names and values hold no line ends: `Endpoint` has checked the user's, the rest is ours."""
    return "".join([f"{name}: {text}\r\n" for name, text in headers.items()])


def seconds_left(deadline: Deadline) -> float:
    """Seconds left, never zero, which would mean "do not wait".

    Raises:
        TimeoutError: The time is over.
    """
    if remaining := deadline.remaining_s:
        return remaining
    raise TimeoutError


class _Headers(dict[str, str]):
    """Headers by their names in lower case; `get` takes any case."""

    def get(self, name: str, default: str | None = None, /) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


class _ResponseParser:
    """One response, parsed as its bytes come in. Methods named `on_...` are called by httptools."""

    def __init__(self, limit_bytes: int) -> None:
        self.headers = _Headers()
        self.body = BoundedBody(limit_bytes)
        self.status = 0
        self._received = 0
        self.is_complete = False
        self._keeps_open = False
        self._messages = 0
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def is_reusable(self) -> bool:
        """Whether the connection stays open, and nothing came behind the response."""
        return self._keeps_open and self._messages == 1

    def feed(self, data: bytes) -> None:
        """Parses more of the response.

        Raises:
            ProtocolError: It is too large.
        """
        if self._parser:
            self._parser.feed_data(data)
        self._received += len(data)
        if not self.status and self._received > HEAD_LIMIT:
            raise too_large(HEAD_LIMIT)
        self.body.expect(self.headers.get("content-length"))
        self.body.check(self._received)

    def end(self) -> None:
        """The connection has ended.

        Raises:
            EOFError: In the middle of the response.
        """
        if not self.status:
            raise EOFError("there was no response")
        if self.headers.get("content-length") or self.headers.get("transfer-encoding"):
            raise EOFError("the response is incomplete")

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._messages == 1:  # a second response that nobody requested is dropped
            self.body.add(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
        if self._parser:
            self._keeps_open = self._parser.should_keep_alive()
            self._parser = None  # the two refer to each other: garbage that only a collection would find
