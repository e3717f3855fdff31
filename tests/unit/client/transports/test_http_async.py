"""The asyncio HTTP transport."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from canned import CannedHttp, http, silence

from graphkiln_backend.graph.errors import DeadlineExceeded
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.http_async import AsyncHttpTransport

OK = http(b"[]")


def open_transport(url: str) -> AsyncHttpTransport:
    return AsyncHttpTransport(Endpoint.parse(url, {}, None))


async def index(transport: AsyncHttpTransport, timeout_s: float = 5) -> Any:
    return await transport.send(transport.wire.repository_index(), Deadline.after(timeout_s))


def test_requests_are_concurrent() -> None:
    together = threading.Barrier(8)

    def answer(connection: Any) -> None:
        together.wait(5)
        connection.sendall(OK)

    async def main(url: str) -> Any:
        transport = open_transport(url)
        results = await asyncio.gather(*(index(transport) for _ in range(8)))
        await transport.close()
        return results

    with CannedHttp([answer]) as server:
        assert asyncio.run(main(server.url)) == [[]] * 8


def test_cancelled_request_does_not_affect_others() -> None:
    async def main(url: str) -> Any:
        transport = open_transport(url)
        task = asyncio.create_task(index(transport))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await index(transport)
        await transport.close()
        return result

    with CannedHttp([silence, OK]) as server:
        assert asyncio.run(main(server.url)) == []


def test_deadline_ends_only_its_request() -> None:
    async def main(url: str) -> Any:
        transport = open_transport(url)
        late, good = await asyncio.gather(index(transport, 0.2), later(transport), return_exceptions=True)
        await transport.close()
        return late, good

    async def later(transport: AsyncHttpTransport) -> Any:
        await asyncio.sleep(0.1)
        return await index(transport)

    with CannedHttp([silence, OK]) as server:
        late, good = asyncio.run(main(server.url))
    assert isinstance(late, DeadlineExceeded)
    assert good == []
