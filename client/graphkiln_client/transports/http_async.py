"""KServe v2 over HTTP in an event loop, on aiohttp, which tritonclient's own asynchronous client uses, too."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import yarl

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, ProtocolError
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports.base import Call
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.http_wire import HttpAnswer, HttpMessage, HttpWire, decompressed

T = TypeVar("T")


class AsyncHttpTransport:
    """A pool of keep-alive connections to one HTTP endpoint. Task-safe; belongs to the loop of its first call."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = HttpWire(compression)
        self._endpoint = endpoint
        self._tls = endpoint.tls()
        self._made: aiohttp.ClientSession | None = None

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        return call.read(await self._exchange(call.message, deadline))

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        await asyncio.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._made:
            await self._made.close()

    async def _exchange(self, message: HttpMessage, deadline: Deadline) -> HttpAnswer:
        try:
            async with (
                asyncio.timeout(deadline.remaining_s),
                self._session().request(
                    message.method,
                    yarl.URL(f"{self._endpoint}{message.path}", encoded=True),
                    data=b"".join(message.body) or None,
                    headers={**self._endpoint.headers, **message.headers},
                    allow_redirects=False,
                ) as response,
            ):
                body = await response.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {self._endpoint} within {deadline.timeout_s:g} s") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
            raise ConnectionFailed(f"{self._endpoint} broke off the answer: {error}") from error
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError) as error:
            raise ConnectionFailed(f"cannot trust {self._endpoint}: {error}", hint="check its certificate") from error
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise ConnectionFailed(
                f"{self._endpoint} does not speak TLS as we do: {error}", hint="is it an http:// server?"
            ) from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise ConnectionFailed(
                f"cannot reach {self._endpoint}: {error}", hint="is the server running? graphkiln health --url URL"
            ) from error
        except (aiohttp.ClientError, ValueError, MemoryError) as error:
            raise ProtocolError(f"{self._endpoint} does not answer in HTTP: {error!r}") from error
        body = decompressed(body, response.headers.get("Content-Encoding") or "")
        return HttpAnswer(status=response.status, headers=response.headers, body=body)

    def _session(self) -> aiohttp.ClientSession:
        if self._made is None:
            self._made = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=True,
            )
        return self._made
