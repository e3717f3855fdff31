"""`Client`: a connection to a server. The asynchronous client, driven to the end of each call by its caller.

What lies between an image and its answer is in `image_requests`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

from graphkiln_backend.system.closing import Closeable
from graphkiln_client.async_client import AsyncClient, AsyncSharedMemory
from graphkiln_client.async_model import ModelOptions
from graphkiln_client.defaults import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.model import Model
from graphkiln_client.results import Health, ServedModel
from graphkiln_client.runner import run
from graphkiln_client.transports import open_blocking
from graphkiln_client.transports.endpoint import Compression, Security


class Client(Closeable):
    """A connection to one server. Thread-safe; keeps its connections until closed.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://`, then `host:port`; `user:password@` is sent as a header.
        timeout_s: Seconds that one request to the server may take, its retries together; also sent to the server.
            `classify` and the like may make several, each with this time.
        max_retries: Further attempts after a failure that may pass: no connection, overload, not ready.
        compression: How requests are compressed; worth it over slow networks only.
        fetch_urls: Allow images to be given as `https://` URLs.
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
        **security: Unpack[Security],
    ) -> None:
        self._client = AsyncClient(
            url,
            timeout_s=timeout_s,
            max_retries=max_retries,
            compression=compression,
            fetch_urls=fetch_urls,
            transport_for=open_blocking,
            **security,
        )
        self.url = self._client.url

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> Model:
        """A model of the server; no request is sent before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
            **options: `preprocess`, `labels` and `images`: see `ModelOptions`.
        """
        return Model(self._client.model(name, version, **options))

    def ready(self) -> bool:
        """True if every model of the server is ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.ready())

    def health(self) -> Health:
        """The state of the server, and the models that are not ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.health())

    def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ClientError: The request failed.
        """
        return run(self._client.models())

    def statistics(self) -> list[dict[str, Any]]:
        """The statistics of every version that is loaded, which need no admin key (Triton's statistics extension).

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.statistics())

    def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load or reload a model.

        With `--model-control-mode=explicit`, new versions are served by this call; in its other modes `graphkiln serve`
        loads again what it serves.

        Args:
            name: Model name.
            config: In place of its config.pbtxt until it is loaded again, in the form of `Model.config`; only in
                explicit mode.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ServerError: The model cannot be loaded; the message says why.
            ModelNotReady: The server does not load on demand.
            ClientError: The request failed.
        """
        run(self._client.load(name, config))

    def unload(self, name: str) -> None:
        """Unload a model; return before the server has finished the model's requests.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ModelNotReady: The server does not unload on demand.
            ClientError: The request failed.
        """
        run(self._client.unload(name))

    @contextmanager
    def shared_memory(self) -> Iterator[SharedMemory]:
        """A context whose models exchange tensors with a server on the same machine through shared memory.

        Raises:
            InvalidInput: Shared memory is not available.
        """
        context = self._client.shared_memory()
        shared = run(context.__aenter__())
        try:
            yield SharedMemory(shared)
        finally:
            run(context.__aexit__(None, None, None))

    def close(self) -> None:
        """Close all connections."""
        run(self._client.close())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class SharedMemory:
    """Models whose tensors travel through shared memory."""

    def __init__(self, shared: AsyncSharedMemory) -> None:
        self._shared = shared

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> Model:
        """See `Client.model`."""
        return Model(self._shared.model(name, version, **options))
