"""KServe v2 over HTTP, blocking, on the standard library's `http.client`.

Why not a larger library: beside raw `tritonclient`, eight threads reached 0.22 of its requests per second with httpx,
0.95 with urllib3 and 1.0 with this; one thread 0.59, 0.83 and 1.0. What remains to be done here is a pool, a deadline
and proxies.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import io
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

from graphkiln.client.deadline import Deadline
from graphkiln.client.transports.base import Call
from graphkiln.client.transports.endpoint import Compression, Endpoint
from graphkiln.client.transports.http_wire import HttpAnswer, HttpMessage, HttpWire, decompressed
from graphkiln.graph.errors import ConnectionFailed, DeadlineExceeded, ProtocolError

T = TypeVar("T")

_KEPT = 64
"""Idle connections that are kept; more are opened where more threads call, and closed after their call."""
_READ_BYTES = 1 << 16
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
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {self._endpoint} within {deadline.timeout_s:g} s") from error
        except http.client.IncompleteRead as error:
            raise ConnectionFailed(f"{self._endpoint} broke off the answer") from error
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            raise ConnectionFailed(f"{self._endpoint} broke off the connection: {error}") from error
        except (http.client.HTTPException, MemoryError, OverflowError) as error:
            raise ProtocolError(f"{self._endpoint} does not answer in HTTP: {error!r}") from error
        except ssl.SSLError as error:
            raise ConnectionFailed(f"cannot trust {self._endpoint}: {error}", hint="check its certificate") from error
        except OSError as error:
            raise ConnectionFailed(
                f"cannot reach {self._endpoint}: {error}", hint="is the server running? graphkiln health --url URL"
            ) from error

    def _ask(self, connection: _Connection, message: HttpMessage, deadline: Deadline) -> HttpAnswer:
        """Asks over a connection, which is kept only if everything went well."""
        try:
            answer, reusable = _exchange(connection, message, self._endpoint.headers, deadline)
        except BaseException:
            connection.close()
            raise
        if reusable and len(self._idle) < _KEPT and not self._closed:
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
            if connection.is_quiet:
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
        if proxy and not self._tls:
            prefix = f"http://{self._endpoint.authority}{self._endpoint.path}"
            return _Connection(connection, prefix, proxy.headers)
        return _Connection(connection, self._endpoint.path, {})


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection, and what every path and every set of headers on it begins with."""

    http: http.client.HTTPConnection
    prefix: str
    headers: Mapping[str, str]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come on it since the last answer: neither its end nor a byte too many."""
        poll = select.poll()
        poll.register(self.http.sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self.http.close()


def _exchange(
    connection: _Connection, message: HttpMessage, headers: Mapping[str, str], deadline: Deadline
) -> tuple[HttpAnswer, bool]:
    """The answer, and whether the connection can be used again."""
    http_connection = connection.http
    http_connection.sock.settimeout(_left(deadline))
    size = sum(len(part) for part in message.body)
    http_connection.request(
        message.method,
        connection.prefix + message.path,
        body=b"".join(message.body) if size <= _JOINED_BYTES else iter(message.body),
        headers={**connection.headers, **headers, **message.headers, "Content-Length": str(size)},
    )
    http_connection.response_class = functools.partial(_response, deadline)  # type: ignore[assignment]
    response = http_connection.getresponse()
    body = decompressed(response.read(), response.headers.get("Content-Encoding") or "")
    return HttpAnswer(status=response.status, headers=response.headers, body=body), not response.will_close


def _response(deadline: Deadline, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
    """What http.client shall read an answer with."""
    return http.client.HTTPResponse(_DeadlineSocket(sock, deadline), *args, **options)  # type: ignore[arg-type]


class _DeadlineSocket:
    """What an HTTPResponse reads from: a timeout of a socket is for one read, a deadline for all of them."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._sock, self._deadline), _READ_BYTES)


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


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
