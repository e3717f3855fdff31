"""KServe v2 over HTTP/1.1, blocking: a pool of sockets, with httptools (llhttp) as the response parser.

HTTP libraries are too slow: a request of 1 kB takes 125 us of CPU here, 170 us with tritonclient and 194 us with
http.client. With one caller, urllib3 reaches 0.83 of the requests per second of tritonclient, httpx 0.59.
"""

from __future__ import annotations

import dataclasses
import http.client
import math
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar
from urllib.request import getproxies, proxy_bypass

import httptools

from graphkiln_client.transports.base import (
    HEAD_LIMIT,
    Blocking,
    BoundedBody,
    Call,
    Deadline,
    Owned,
    decompress,
    too_large,
)
from graphkiln_client.transports.endpoint import (
    Compression,
    Endpoint,
    deadline_exceeded,
    disconnected,
    not_http,
    tls_failed,
    unreachable,
    untrusted,
)
from graphkiln_client.transports.http_wire import HttpRequest, HttpResponse, HttpWire

T = TypeVar("T")

_MAX_IDLE = 64  # more concurrent threads open connections that are closed after their call
_FRESH_S = 0.5  # connections that were idle for longer are checked, because the server may have closed them
_TIMEOUT_TOLERANCE_S = 0.01
_RECEIVED_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16  # up to this size a copy is cheaper than another system call


class HttpTransport(Blocking):
    """Connection pool for one HTTP endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = HttpWire(compression)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._proxy = _proxy(endpoint)
        self._idle: Owned[deque[HttpConnection]] = Owned(deque, _close_all, endpoint, in_loop=False)

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        idle, request = self._idle.get(), call.request
        if idle is None:
            idle = await self._idle.open()
        if request.is_admin:
            request = request.authorize(self._endpoint)
        return call.read(self._exchange(request, deadline, idle))

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._idle.close()

    def _exchange(self, request: HttpRequest, deadline: Deadline, idle: deque[HttpConnection]) -> HttpResponse:
        try:
            return self._exchange_on(_pop_quiet(idle) or self._open(deadline), request, deadline, idle)
        except TimeoutError as error:
            raise deadline_exceeded(self._endpoint, deadline) from error
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise disconnected(self._endpoint, error) from error
        except (httptools.HttpParserError, http.client.HTTPException) as error:
            raise not_http(self._endpoint, error) from error
        except ssl.SSLCertVerificationError as error:
            raise untrusted(self._endpoint, error) from error
        except ssl.SSLError as error:
            raise tls_failed(self._endpoint, error) from error
        except OSError as error:
            raise unreachable(self._endpoint, error) from error

    def _exchange_on(
        self, connection: HttpConnection, request: HttpRequest, deadline: Deadline, idle: deque[HttpConnection]
    ) -> HttpResponse:
        """Send a request over a connection; reuse the connection only after success."""
        try:
            response, reusable = connection.exchange(request, deadline)
        except BaseException:
            connection.close()
            raise
        if reusable and len(idle) < _MAX_IDLE and not self._idle.is_closed:
            connection.idle_since = time.monotonic()
            idle.append(connection)
        else:
            connection.close()
        return response

    def _open(self, deadline: Deadline) -> HttpConnection:
        """Connect with http.client, which supports proxy tunnels."""
        address = (self._endpoint.host, self._endpoint.port)
        proxy = self._proxy
        first = (proxy.host, proxy.port) if proxy else address
        timeout_s = _seconds_left(deadline)
        connection = (
            http.client.HTTPSConnection(*first, timeout=timeout_s, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(*first, timeout=timeout_s)
        )
        if proxy and self._tls:
            connection.set_tunnel(*address, headers=dict(proxy.headers))
        connection.connect()
        headers = {"Host": self._endpoint.authority, "User-Agent": "graphkiln", **self._endpoint.headers}
        if proxy and not self._tls:
            prefix = f"http://{self._endpoint.authority}{self._endpoint.path}"
            return HttpConnection(connection.sock, prefix, _header_lines({**headers, **proxy.headers}))
        return HttpConnection(connection.sock, self._endpoint.path, _header_lines(headers))


def _pop_quiet(idle: deque[HttpConnection]) -> HttpConnection | None:
    """Take an idle connection that is still open; None if there is none."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        if time.monotonic() - connection.idle_since < _FRESH_S or connection.is_quiet:
            return connection
        connection.close()


async def _close_all(idle: deque[HttpConnection]) -> None:
    while idle:
        idle.pop().close()


def _proxy(endpoint: Endpoint) -> Endpoint | None:
    """Return the proxy of the environment (`http_proxy`, `https_proxy`, `no_proxy`), or None."""
    url = getproxies().get(endpoint.scheme)
    if not url or endpoint.is_local or proxy_bypass(endpoint.authority):
        return None
    proxy = Endpoint.parse(url)
    headers = {name.replace("Authorization", "Proxy-Authorization"): text for name, text in proxy.headers.items()}
    return dataclasses.replace(proxy, headers=headers)


@dataclass(slots=True)
class HttpConnection:
    """An open connection, used by one thread at a time.

    Attributes:
        prefix: Prefix of every request's path.
        headers: Header lines of every request.
        timeout_s: Current timeout of the socket.
        idle_since: End of the last response on the clock of `time.monotonic()`.
    """

    sock: socket.socket
    prefix: str
    headers: str
    timeout_s: float = math.inf
    idle_since: float = 0.0

    @property
    def is_quiet(self) -> bool:
        """True if the server has neither closed the connection nor sent unexpected bytes."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, request: HttpRequest, deadline: Deadline) -> tuple[HttpResponse, bool]:
        """Send a request and read its response.

        Returns:
            The response, and whether the connection can be reused.

        Raises:
            OSError: The connection failed, or the deadline passed.
            EOFError: The server closed the connection before the response was complete.
            httptools.HttpParserError: The response is not HTTP.
            ProtocolError: The response is too large, or cannot be decompressed.
        """
        self._send(request, deadline)
        parser = _ResponseParser(request.limit_bytes)
        while not parser.is_complete:
            self._limit(deadline)
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
        own = _header_lines(request.headers)
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
        """Set the socket's timeout to the remaining time, unless it is close enough: setting it takes a system call."""
        left_s = _seconds_left(deadline)
        if abs(left_s - self.timeout_s) > _TIMEOUT_TOLERANCE_S:
            self.timeout_s = left_s
            self.sock.settimeout(left_s)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def _header_lines(headers: Mapping[str, str]) -> str:
    """Format header lines; `Endpoint` has checked that they contain no line breaks."""
    return "".join([f"{name}: {text}\r\n" for name, text in headers.items()])


def _seconds_left(deadline: Deadline) -> float:
    """Return the remaining seconds; raise TimeoutError instead of 0, which sockets take as non-blocking."""
    if remaining := deadline.remaining_s:
        return remaining
    raise TimeoutError


class _Headers(dict[str, str]):
    """Headers by lower-case name; `get` is case-insensitive."""

    def get(self, name: str, default: str | None = None, /) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


class _ResponseParser:
    """Incremental parser of one response. httptools calls the `on_...` methods."""

    def __init__(self, limit_bytes: int) -> None:
        self.headers = _Headers()
        self.body = BoundedBody(limit_bytes)
        self.status = 0
        self.is_complete = False
        self._received = 0
        self._keeps_open = False
        self._messages = 0
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def is_reusable(self) -> bool:
        """True if the connection stays open and no bytes followed the response."""
        return self._keeps_open and self._messages == 1

    def feed(self, data: bytes) -> None:
        """Parse the next bytes.

        Raises:
            ProtocolError: The response is too large.
        """
        if self._parser:
            self._parser.feed_data(data)
        self._received += len(data)
        if not self.status and self._received > HEAD_LIMIT:
            raise too_large(HEAD_LIMIT)
        self.body.expect(self.headers.get("content-length"))
        self.body.check(self._received)

    def end(self) -> None:
        """Handle a closed connection.

        Raises:
            EOFError: The response is incomplete.
        """
        if not self.status:
            raise EOFError("the server sent no response")
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
        if self._messages == 1:  # drop a second response
            self.body.add(body)

    def on_message_complete(self) -> None:
        if self.status < HTTPStatus.OK:  # an interim response, such as 103 Early Hints
            self.headers.clear()
            self.status = self._messages = 0
            return
        self.is_complete = True
        if self._parser:
            self._keeps_open = self._parser.should_keep_alive()
            self._parser = None  # break the reference cycle
