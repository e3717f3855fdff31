"""`AsyncClient`: a connection to a server, as event loops use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack

from graphkiln_backend.graph.errors import ClientError, InvalidInput, Unauthorized
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_client.async_model import AsyncModel
from graphkiln_client.connection import Connection
from graphkiln_client.defaults import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.encoded_images import Form
from graphkiln_client.metadata import versions_in
from graphkiln_client.results import Health, ServedModel
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint, Security
from graphkiln_client.transports.factory import open_async

_DIED = "is not healthy"  # Triton's words for an instance whose process ended
_ITS_LOG = "a process was killed while it loaded the model; the server's log says by which signal and what to try"
_LONGEST_S = 2e6  # for infinity, too: the system's calls take milliseconds in 32 bits, which are 24 days


class AsyncClient:
    """A connection to one server, for an event loop. Task-safe; keeps its connections until closed.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://`, then `host:port`; `user:password@` is sent as a header.
        timeout_s: Seconds that one call may take, all its attempts together; the server is told as well.
        max_retries: Further attempts after a failure that may pass: no connection, overload, not ready.
        compression: How requests are compressed; worth it over slow networks only.
        fetch_urls: Whether images may be given as `https://` URLs.
        transport_for: Opens the transport; the synchronous client passes one that blocks.
        **security: `headers`, `ca_file`, `client_cert`, `client_key` and `admin_key`: see `Security`.

    Raises:
        InvalidInput: The URL, a header, a file or the admin key cannot be used.
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

    def model(
        self,
        name: str,
        version: str = "",
        *,
        preprocess: Preprocess | None = None,
        labels: Sequence[str] | None = None,
        images: Form = "auto",
    ) -> AsyncModel:
        """A model of the server; no request is sent before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
            preprocess: In place of the spec that the server publishes.
            labels: In place of the labels that the server knows; by class index.
            images: `"encoded"` sends images as they are, `"tensor"` decodes them here; `"auto"` sends them as they are
                where that is smaller and the server takes them.
        """
        return AsyncModel(
            self._connection,
            name,
            version,
            preprocess=preprocess,
            labels=labels,
            fetch_urls=self._fetch_urls,
            images=images,
        )

    async def ready(self) -> bool:
        """Whether every model of the server is ready.

        Raises:
            ClientError: The request failed.
        """
        return await self._connection.call(self._connection.wire.ready())

    async def health(self) -> Health:
        """The state of the server, and which models are not ready.

        Raises:
            ClientError: The request failed.
        """
        wire = self._connection.wire
        if not await self._connection.call(wire.live()):
            return Health(live=False, ready=False)
        ready = await self._connection.call(wire.ready())
        metadata = await self._connection.call(wire.server_metadata())
        not_ready = () if ready else await self._not_ready()
        server = f"{metadata.get('name', '')} {metadata.get('version', '')}".strip()
        return Health(live=True, ready=ready, server=server, not_ready=not_ready)

    async def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ClientError: The request failed.
        """
        rows = await self._connection.call(self._connection.wire.repository_index())
        return tuple(sorted(map(ServedModel.parse, rows), key=lambda row: (row.name, row.version)))

    async def statistics(self) -> list[dict[str, Any]]:
        """The statistics of every version that is loaded, which need no admin key (Triton's statistics extension).

        Raises:
            ClientError: The request failed.
        """
        return versions_in(await self._connection.call(self._connection.wire.model_statistics("", "")))

    async def _not_ready(self) -> tuple[ServedModel, ...]:
        """Empty where only the server's administrator may list its models: whether it is ready is still known."""
        try:
            return tuple(model for model in await self.models() if not model.ready)
        except Unauthorized:
            return ()

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Loads or reloads a model.

        With `--model-control-mode=explicit`, that is how new versions are served; `graphkiln serve` in its other modes
        loads again what it serves.

        Args:
            name: Model name.
            config: What stands in the place of its config.pbtxt until it is loaded again, as `Model.config` shows it;
                only in explicit mode.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ServerError: The model cannot be loaded; the message says why.
            ModelNotReady: The server does not load on demand.
            ClientError: The request failed.
        """
        try:
            await self._connection.call(self._connection.wire.load(name, json.dumps(config) if config else ""))
        except ClientError as error:
            if _DIED in error.message:
                error.hint = _ITS_LOG
            raise

    async def unload(self, name: str) -> None:
        """Unloads a model; returns before the server has finished the model's requests.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ModelNotReady: The server does not unload on demand.
            ClientError: The request failed.
        """
        await self._connection.call(self._connection.wire.unload(name))

    @asynccontextmanager
    async def shared_memory(self) -> AsyncIterator[AsyncSharedMemory]:
        """A context whose models exchange tensors with a server on the same machine through shared memory.

        Raises:
            InvalidInput: Shared memory is not available.
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class AsyncSharedMemory:
    """Gives models whose tensors travel through shared memory."""

    def __init__(self, connection: Connection, pool: RegionPool, *, fetch_urls: bool) -> None:
        self._connection = connection
        self._pool = pool
        self._fetch_urls = fetch_urls

    def model(
        self,
        name: str,
        version: str = "",
        *,
        preprocess: Preprocess | None = None,
        labels: Sequence[str] | None = None,
        images: Form = "auto",
    ) -> AsyncModel:
        """See `AsyncClient.model`."""
        return AsyncModel(
            self._connection,
            name,
            version,
            preprocess=preprocess,
            labels=labels,
            fetch_urls=self._fetch_urls,
            images=images,
            regions=self._pool,
        )
