"""`AsyncClient`: a connection to a server, as event loops use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_client.asynchronous_model import AsyncModel
from graphkiln_client.connection import Connection
from graphkiln_client.results import Health, ServedModel
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.opening import open_async

DEFAULT_URL = "http://localhost:8000"


class AsyncClient:
    """A connection to one server, for an event loop. Task-safe; keeps its connections until closed.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://`, then `host:port`; `user:password@` is sent as a header.
        timeout_s: Seconds that one call may take, all its attempts together; the server is told, too.
        max_retries: Further attempts after a failure that may pass: no connection, overload, not ready.
        headers: Sent with every call, for example `{"Authorization": "Bearer ..."}`; never shown.
        ca_file: Certificate authorities to trust in place of the system's.
        compression: How requests are compressed; pays only over slow networks.
        fetch_urls: Whether images may be given as `https://` URLs.
        transport_for: How calls travel; the synchronous client gives a transport that blocks.

    Raises:
        InvalidInput: The URL, a header or the CA file cannot be used.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        ca_file: str | Path | None = None,
        compression: Compression = "",
        fetch_urls: bool = False,
        transport_for: Callable[[Endpoint, Compression], Transport] = open_async,
    ) -> None:
        if not timeout_s > 0 or max_retries < 0:
            raise InvalidInput(f"timeout_s must be above 0 and max_retries not below, got {timeout_s}, {max_retries}")
        endpoint = Endpoint.parse(url, headers or {}, Path(ca_file) if ca_file else None)
        self.url = str(endpoint)
        self._fetch_urls = fetch_urls
        self._connection = Connection(transport_for(endpoint, compression), timeout_s, max_retries)

    def model(
        self, name: str, version: str = "", *, preprocess: Preprocess | None = None, labels: Sequence[str] | None = None
    ) -> AsyncModel:
        """A model of the server; nothing is asked before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
            preprocess: In place of the spec that the server publishes.
            labels: In place of the labels that the server knows; by class index.
        """
        return AsyncModel(
            self._connection, name, version, preprocess=preprocess, labels=labels, fetch_urls=self._fetch_urls
        )

    async def ready(self) -> bool:
        """Whether every model of the server is ready.

        Raises:
            ClientError: The server cannot be asked.
        """
        return await self._connection.call(self._connection.wire.ready())

    async def health(self) -> Health:
        """How the server is, and which models are not ready.

        Raises:
            ClientError: The server cannot be asked.
        """
        wire = self._connection.wire
        if not await self._connection.call(wire.live()):
            return Health(live=False, ready=False)
        ready = await self._connection.call(wire.ready())
        metadata = await self._connection.call(wire.server_metadata())
        waiting = () if ready else tuple(model for model in await self.models() if not model.ready)
        server = f"{metadata.get('name', '')} {metadata.get('version', '')}".strip()
        return Health(live=True, ready=ready, server=server, not_ready=waiting)

    async def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            ClientError: The server cannot be asked.
        """
        rows = await self._connection.call(self._connection.wire.repository_index())
        return tuple(sorted(map(ServedModel.parse, rows), key=lambda row: (row.name, row.version)))

    async def load(self, name: str) -> None:
        """Loads a model, or loads it anew; the server must run with `--model-control-mode=explicit`.

        Raises:
            ServerError: The model cannot be loaded; the message holds the cause.
            ModelNotReady: The server does not load on demand.
            ClientError: The server cannot be asked.
        """
        await self._connection.call(self._connection.wire.load(name))

    async def unload(self, name: str) -> None:
        """Unloads a model; the server finishes its requests first, and answers before that.

        Raises:
            ModelNotReady: The server does not unload on demand.
            ClientError: The server cannot be asked.
        """
        await self._connection.call(self._connection.wire.unload(name))

    @asynccontextmanager
    async def shared_memory(self) -> AsyncIterator[AsyncSharedMemory]:
        """A context whose models exchange tensors with a server on the same machine through shared memory.

        Raises:
            InvalidInput: There is no shared memory to be had.
        """
        pool = RegionPool(self._connection)
        try:
            yield AsyncSharedMemory(self._connection, pool, fetch_urls=self._fetch_urls)
        finally:
            await pool.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self._connection.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class AsyncSharedMemory:
    """Models whose tensors travel through shared memory."""

    def __init__(self, connection: Connection, pool: RegionPool, *, fetch_urls: bool) -> None:
        self._connection = connection
        self._pool = pool
        self._fetch_urls = fetch_urls

    def model(
        self, name: str, version: str = "", *, preprocess: Preprocess | None = None, labels: Sequence[str] | None = None
    ) -> AsyncModel:
        """See `AsyncClient.model`."""
        return AsyncModel(
            self._connection,
            name,
            version,
            preprocess=preprocess,
            labels=labels,
            fetch_urls=self._fetch_urls,
            regions=self._pool,
        )
