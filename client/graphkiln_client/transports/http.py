"""KServe v2 over HTTP, blocking: sockets of the standard library, answers parsed by httptools (llhttp, in C).

Why no larger library: beside raw `tritonclient`, eight threads reached 0.22 of its requests per second with httpx, one
thread 0.59; urllib3 0.95 and 0.83; http.client 0.97 and 0.94. What is left to be done here is a pool, a deadline for
the whole answer, and proxies.
"""

from __future__ import annotations

import dataclasses
import http.client
import math
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.request import getproxies, proxy_bypass

import httptools

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, ProtocolError
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports.base import Call
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.http_wire import HttpAnswer, HttpMessage, HttpWire, decompressed

T = TypeVar("T")

_KEPT = 64
"""Idle connections that are kept; more are opened where more threads call, and closed after their call."""
_NEARLY_S = 0.01
_FRESH_S = 0.5
"""A connection that was idle for longer is looked at before it is used: the server may have closed it."""
_TIMEVAL = struct.Struct("@ll")
_RECEIVED_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16
"""Up to here one copy is cheaper than one more system call."""


class HttpTransport:
    """A pool of keep-alive connections to one HTTP endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = HttpWire(compression)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._proxy = _proxy(endpoint)
        self._idle: deque[_Connection] = deque()
        self._closed = False

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        return call.read(self._exchange(call.message, deadline))

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        time.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return work()

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _exchange(self, message: HttpMessage, deadline: Deadline) -> HttpAnswer:
        try:
            return self._ask(self._kept() or self._open(deadline), message, deadline)
        except (TimeoutError, BlockingIOError) as error:  # Python's timeouts, and the kernel's
            raise DeadlineExceeded(f"no answer from {self._endpoint} within {deadline.timeout_s:g} s") from error
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise ConnectionFailed(f"{self._endpoint} broke off: {error}") from error
        except (httptools.HttpParserError, http.client.HTTPException) as error:
            raise ProtocolError(f"{self._endpoint} does not answer in HTTP: {error!r}") from error
        except ssl.SSLCertVerificationError as error:
            raise ConnectionFailed(f"cannot trust {self._endpoint}: {error}", hint="check its certificate") from error
        except ssl.SSLError as error:
            raise ConnectionFailed(
                f"{self._endpoint} does not speak TLS as we do: {error}", hint="is it an http:// server?"
            ) from error
        except OSError as error:
            raise ConnectionFailed(
                f"cannot reach {self._endpoint}: {error}", hint="is the server running? graphkiln health --url URL"
            ) from error

    def _ask(self, connection: _Connection, message: HttpMessage, deadline: Deadline) -> HttpAnswer:
        """Asks over a connection, which is kept only if everything went well."""
        try:
            answer, reusable = connection.exchange(message, deadline)
        except BaseException:
            connection.close()
            raise
        if reusable and len(self._idle) < _KEPT and not self._closed:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _kept(self) -> _Connection | None:
        """An idle connection that nobody has closed or spoilt meanwhile."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - connection.idle_since < _FRESH_S or connection.is_quiet:
                return connection
            connection.close()

    def _open(self, deadline: Deadline) -> _Connection:
        address = (self._endpoint.host, self._endpoint.port)
        proxy = self._proxy
        first = (proxy.host, proxy.port) if proxy else address
        timeout_s = _left(deadline)
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
            return _Connection(connection.sock, prefix, _lines({**headers, **proxy.headers}))
        return _Connection(connection.sock, self._endpoint.path, _lines(headers))


def _lines(headers: Mapping[str, str]) -> str:
    """Header lines; names and values hold no line ends: `Endpoint` has checked the user's, the rest is ours."""
    return "".join([f"{name}: {text}\r\n" for name, text in headers.items()])


@dataclass(slots=True)
class _Connection:
    """An open connection, and what every request on it begins with: of its path, and of its headers."""

    sock: socket.socket
    prefix: str
    headers: str
    timeout_s: float = math.inf
    idle_since: float = 0.0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come since the last answer: neither the connection's end nor a byte too many."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, message: HttpMessage, deadline: Deadline) -> tuple[HttpAnswer, bool]:
        """The answer, and whether the connection can be used again.

        Raises:
            OSError: The connection broke, or the time was over.
            EOFError: The server closed it before the answer was whole.
            httptools.HttpParserError: The answer is not HTTP.
        """
        self._send(message, deadline)
        answer = _AnswerParser()
        while not answer.is_complete:
            self._limit(deadline)  # a socket's timeout is for one read, a deadline for all of them
            data = self.sock.recv(_RECEIVED_BYTES)
            if not data:
                answer.end()
                break
            answer.feed(data)
        body = decompressed(b"".join(answer.body), answer.headers.get("content-encoding") or "")
        return HttpAnswer(status=answer.status, headers=answer.headers, body=body), answer.is_reusable

    def _send(self, message: HttpMessage, deadline: Deadline) -> None:
        size = sum([len(part) for part in message.body])
        begin = f"{message.method} {self.prefix}{message.path} HTTP/1.1\r\n{self.headers}{_lines(message.headers)}"
        head = f"{begin}Content-Length: {size}\r\n\r\n".encode("ascii")
        self._limit(deadline)
        if size <= _JOINED_BYTES:
            self.sock.sendall(b"".join((head, *message.body)))
            return
        self.sock.sendall(head)
        for part in message.body:
            self._limit(deadline)
            self.sock.sendall(part)

    def _limit(self, deadline: Deadline) -> None:
        """Sets the socket's timeout where it is not nearly right already.

        The kernel's own timeouts: Python's would ask whether the socket is ready before each call, which is a system
        call more, and costs as much as the call. TLS cannot do without.
        """
        left_s = _left(deadline)
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
        self.sock.close()


class _Headers(dict[str, str]):
    """Headers by their names in small letters, found in whatever case one asks."""

    def get(self, name: str, default: str | None = None, /) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


class _AnswerParser:
    """One response, as its bytes come in. Methods named `on_...` are called by httptools."""

    def __init__(self) -> None:
        self.headers = _Headers()
        self.body: list[bytes] = []
        self.status = 0
        self.is_complete = False
        self._keeps_open = False
        self._messages = 0
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def is_reusable(self) -> bool:
        """Whether the connection stays open, and nothing came behind the answer."""
        return self._keeps_open and self._messages == 1

    def feed(self, data: bytes) -> None:
        if self._parser:
            self._parser.feed_data(data)

    def end(self) -> None:
        """The connection has ended.

        Raises:
            EOFError: In the middle of the answer.
        """
        if not self.status:
            raise EOFError("no answer came")
        if self.headers.get("content-length") or self.headers.get("transfer-encoding"):
            raise EOFError("the answer is not whole")

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._messages == 1:  # a second answer that nobody asked for is nobody's
            self.body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
        if self._parser:
            self._keeps_open = self._parser.should_keep_alive()
            self._parser = None  # the two refer to each other: garbage that only a collection would find


def _left(deadline: Deadline) -> float:
    """Seconds left, never zero, which would mean "do not wait"."""
    if remaining := deadline.remaining_s:
        return remaining
    raise TimeoutError


def _proxy(endpoint: Endpoint) -> Endpoint | None:
    """The proxy that the environment names for this endpoint: `http_proxy`, `https_proxy`, `no_proxy`."""
    url = getproxies().get(endpoint.scheme)
    if not url or proxy_bypass(endpoint.authority):
        return None
    proxy = Endpoint.parse(url, {}, None)
    headers = {name.replace("Authorization", "Proxy-Authorization"): text for name, text in proxy.headers.items()}
    return dataclasses.replace(proxy, headers=headers)
