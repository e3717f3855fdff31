"""`AsyncClient`: a connection to a server, as event loops use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack

from graphkiln_backend.graph.errors import ClientError, InvalidInput, Unauthorized
from graphkiln_client.async_model import AsyncModel, ModelOptions
from graphkiln_client.connection import Connection
from graphkiln_client.defaults import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.published import check_statistics
from graphkiln_client.results import Health, ServedModel
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports import open_async
from graphkiln_client.transports.base import Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint, Security

_DIED = "is not healthy"  # Triton's words for an instance whose process ended
_ITS_LOG = "a process was killed while it loaded the model; the server's log says by which signal and what to try"
_LONGEST_S = 2e6  # for infinity, too: the system's calls take milliseconds in 32 bits, which are 24 days


class AsyncClient:
    """A connection to one server, for an event loop: `Client` with `await`. Task-safe.

    `transport_for` opens the transport; the synchronous client passes one that blocks.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        compression: Compression = "",
        fetch_urls: bool = False,
        transport_for: Callable[[Endpoint, Compression], Transport] = open_async,
        **security: Unpack[Security],
    ) -> None:
        if not timeout_s > 0 or max_retries < 0:
            raise InvalidInput(f"timeout_s must be above 0 and max_retries at least 0, got {timeout_s}, {max_retries}")
        endpoint = Endpoint.parse(url, **security)
        self.url = str(endpoint)
        self._fetch_urls = fetch_urls
        self._connection = Connection(transport_for(endpoint, compression), min(timeout_s, _LONGEST_S), max_retries)

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> AsyncModel:
        """See `Client.model`."""
        return AsyncModel(self._connection, name, version, fetch_urls=self._fetch_urls, **options)

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._connection.call(self._connection.wire.ready())

    async def health(self) -> Health:
        """See `Client.health`."""
        wire = self._connection.wire
        if not await self._connection.call(wire.live()):
            return Health(live=False, ready=False)
        ready = await self._connection.call(wire.ready())
        metadata = await self._connection.call(wire.server_metadata())
        not_ready = () if ready else await self._not_ready()
        server = f"{metadata.get('name', '')} {metadata.get('version', '')}".strip()
        return Health(live=True, ready=ready, server=server, not_ready=not_ready)

    async def models(self) -> tuple[ServedModel, ...]:
        """See `Client.models`."""
        rows = await self._connection.call(self._connection.wire.repository_index())
        return tuple(sorted(map(ServedModel.parse, rows), key=lambda row: (row.name, row.version)))

    async def statistics(self) -> list[dict[str, Any]]:
        """See `Client.statistics`."""
        return check_statistics(await self._connection.call(self._connection.wire.model_statistics("", "")))

    async def _not_ready(self) -> tuple[ServedModel, ...]:
        """Empty where only the server's administrator may list its models: whether it is ready is still known."""
        try:
            return tuple(model for model in await self.models() if not model.ready)
        except Unauthorized:
            return ()

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """See `Client.load`."""
        try:
            await self._connection.call(self._connection.wire.load(name, json.dumps(config) if config else ""))
        except ClientError as error:
            if _DIED in error.message:
                error.hint = _ITS_LOG
            raise

    async def unload(self, name: str) -> None:
        """See `Client.unload`."""
        await self._connection.call(self._connection.wire.unload(name))

    @asynccontextmanager
    async def shared_memory(self) -> AsyncIterator[AsyncSharedMemory]:
        """See `Client.shared_memory`."""
        pool = RegionPool(self._connection)
        try:
            yield AsyncSharedMemory(self._connection, pool, fetch_urls=self._fetch_urls)
        finally:
            await pool.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._connection.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class AsyncSharedMemory:
    """Models whose tensors travel through shared memory."""

    def __init__(self, connection: Connection, regions: RegionPool, *, fetch_urls: bool) -> None:
        self._connection = connection
        self._regions = regions
        self._fetch_urls = fetch_urls

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> AsyncModel:
        """See `Client.model`."""
        return AsyncModel(
            self._connection, name, version, fetch_urls=self._fetch_urls, regions=self._regions, **options
        )
