"""KServe v2 over HTTP for event loops, with aiohttp (as in tritonclient's asynchronous client)."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Any, TypeVar

import aiohttp
import yarl

from graphkiln_client.transports.base import BoundedBody, Call, Deadline, InEventLoop, Owned, decompress
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


class AsyncHttpTransport(InEventLoop):
    """Connection pools for one HTTP endpoint, one for each event loop. Task-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = HttpWire(compression)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._sessions = Owned(self._open_session, aiohttp.ClientSession.close, endpoint, in_loop=True)

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        request = call.request.authorize(self._endpoint) if call.request.is_admin else call.request
        return call.read(await self._exchange(request, deadline))

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._sessions.close()

    async def _exchange(self, request: HttpRequest, deadline: Deadline) -> HttpResponse:
        session = self._sessions.get() or await self._sessions.open()
        try:
            async with (
                asyncio.timeout(deadline.remaining_s),
                session.request(
                    request.method,
                    yarl.URL(f"{self._endpoint}{request.path}", encoded=True),
                    data=b"".join(request.body) or None,
                    headers={**self._endpoint.headers, **request.headers},
                    allow_redirects=False,
                ) as response,
            ):
                body = await _read_body(response, request.limit_bytes)
        except TimeoutError as error:
            raise deadline_exceeded(self._endpoint, deadline) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
            raise disconnected(self._endpoint, error) from error
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError) as error:
            raise untrusted(self._endpoint, error) from error
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise tls_failed(self._endpoint, error) from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise unreachable(self._endpoint, error) from error
        except aiohttp.ClientResponseError as error:  # its repr would show the headers, which may contain secrets
            raise not_http(self._endpoint, ValueError(error.message)) from error
        except (aiohttp.ClientError, ValueError, MemoryError) as error:
            raise not_http(self._endpoint, error) from error
        body = decompress(body, response.headers.get("Content-Encoding") or "", request.limit_bytes)
        return HttpResponse(status=response.status, headers=response.headers, body=body)

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Connector(limit=0, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=not self._endpoint.is_local,  # use the proxy of the environment
        )


class _Connector(aiohttp.TCPConnector):
    """A pool that a forked child forgets without closing it: it would remove the sockets from its parent's selector."""

    def __init__(self, **options: Any) -> None:
        self._process = os.getpid()
        super().__init__(**options)

    def __del__(self, *_: Any) -> None:
        if os.getpid() == self._process:
            super().__del__()


async def _read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = BoundedBody(limit_bytes)
    body.expect(response.headers.get("Content-Length"))
    async for piece in response.content.iter_any():
        body.add(piece)
        body.check()
    return body.content()
