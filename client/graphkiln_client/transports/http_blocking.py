"""KServe v2 over HTTP, blocking: a pool of connections on sockets of the standard library.

Why no larger library: beside raw `tritonclient`, eight threads reached 0.22 of its requests per second with httpx, one
thread 0.59; urllib3 0.95 and 0.83; http.client 0.97 and 0.94. What is left to be done here is a pool, a deadline for
the whole response, and proxies.
"""

from __future__ import annotations

import dataclasses
import http.client
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar
from urllib.request import getproxies, proxy_bypass

import httptools

from graphkiln_client.transports import limits as failures
from graphkiln_client.transports.base import Call, Deadline
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.http_connection import HttpConnection, header_lines, seconds_left
from graphkiln_client.transports.http_wire import HttpRequest, HttpResponse, HttpWire

T = TypeVar("T")

_MAX_IDLE = 64  # idle connections that are kept; more are opened where more threads call, and closed after their call
_FRESH_S = 0.5  # A connection that was idle for longer is polled before it is used: the server may have closed it


class HttpTransport:
    """A pool of keep-alive connections to one HTTP endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = HttpWire(compression)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._proxy = _proxy(endpoint)
        self._idle: deque[HttpConnection] = deque()
        self._closed = False

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        return call.read(self._exchange(call.request.authorize(self._endpoint), deadline))

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

    def _exchange(self, request: HttpRequest, deadline: Deadline) -> HttpResponse:
        try:
            return self._exchange_on(self._pop_idle() or self._open(deadline), request, deadline)
        except (TimeoutError, BlockingIOError) as error:  # Python's timeouts, and the kernel's
            raise failures.deadline_exceeded(self._endpoint, deadline) from error
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise failures.disconnected(self._endpoint, error) from error
        except (httptools.HttpParserError, http.client.HTTPException) as error:
            raise failures.not_http(self._endpoint, error) from error
        except ssl.SSLCertVerificationError as error:
            raise failures.untrusted(self._endpoint, error) from error
        except ssl.SSLError as error:
            raise failures.tls_failed(self._endpoint, error) from error
        except OSError as error:
            raise failures.unreachable(self._endpoint, error) from error

    def _exchange_on(self, connection: HttpConnection, request: HttpRequest, deadline: Deadline) -> HttpResponse:
        """Sends over a connection, which is kept only if everything went well."""
        try:
            response, reusable = connection.exchange(request, deadline)
        except BaseException:
            connection.close()
            raise
        if reusable and len(self._idle) < _MAX_IDLE and not self._closed:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _pop_idle(self) -> HttpConnection | None:
        """An idle connection on which nothing has happened since, or None."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - connection.idle_since < _FRESH_S or connection.is_quiet:
                return connection
            connection.close()

    def _open(self, deadline: Deadline) -> HttpConnection:
        address = (self._endpoint.host, self._endpoint.port)
        proxy = self._proxy
        first = (proxy.host, proxy.port) if proxy else address
        timeout_s = seconds_left(deadline)
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
            return HttpConnection(connection.sock, prefix, header_lines({**headers, **proxy.headers}))
        return HttpConnection(connection.sock, self._endpoint.path, header_lines(headers))


def _proxy(endpoint: Endpoint) -> Endpoint | None:
    """The proxy that the environment names for this endpoint: `http_proxy`, `https_proxy`, `no_proxy`."""
    url = getproxies().get(endpoint.scheme)
    if not url or endpoint.is_local or proxy_bypass(endpoint.authority):
        return None
    proxy = Endpoint.parse(url)
    headers = {name.replace("Authorization", "Proxy-Authorization"): text for name, text in proxy.headers.items()}
    return dataclasses.replace(proxy, headers=headers)
