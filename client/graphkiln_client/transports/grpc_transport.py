"""KServe v2 over gRPC, on grpcio: blocking, and in an event loop."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.admin_key import needs_admin_key
from graphkiln_client.transports import failures
from graphkiln_client.transports.base import Call, Deadline
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.grpc_wire import GrpcRequest, GrpcWire, grpc_error, parse_response
from graphkiln_client.transports.limits import infer_limit, too_large

T = TypeVar("T")

_PROBE_S = 1.0  # time for a server to answer that it is live

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # retries are the client's, under its deadline
    # By default a channel that could not connect refuses calls for a second, later for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name, the time that a connection may take. Source: subchannel.cc of gRPC, `min_connect_timeout`.
    ("grpc.min_reconnect_backoff_ms", 10_000),
]
# Part of grpcio's message for a response over the limit, whose status is that of overload, too.
_TOO_LARGE = "message larger than max"
_COMPRESSION = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


class _GrpcTransport(ABC):
    """One HTTP/2 channel to one gRPC endpoint, opened at the first call."""

    _library: Any
    _closed_errors: type[Exception]  # raised by calls on a channel that was closed

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = GrpcWire()
        self._endpoint = endpoint
        self._compression: Compression = compression
        self._metadata = _to_metadata(endpoint.headers)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        try:
            response = await self._call(call.request, deadline.remaining_s)
        except grpc.RpcError as error:
            reachable = not _may_be_unreachable(error) or await self._is_live(deadline)
            raise translate_error(error, self._endpoint, deadline, call.request, reachable=reachable) from error
        return call.read(response)

    async def _call(self, request: GrpcRequest, timeout_s: float) -> Any:
        admin = _to_metadata(self._endpoint.admin_headers()) if request.is_admin else ()
        metadata = (*self._metadata, *admin) or None
        try:
            method = self._methods.get(request.method)
            if method is None:
                method = self._open().unary_unary(request.method, _registered_method=True)
                self._methods[request.method] = method
            response = await self._invoke(method, request.message, timeout=timeout_s, metadata=metadata)
        except self._closed_errors as error:
            raise InvalidInput(f"the client of {self._endpoint} is closed") from error
        return parse_response(response, request)

    @abstractmethod
    async def _invoke(self, method: Any, message: bytes, **options: Any) -> Any: ...

    async def _is_live(self, deadline: Deadline) -> bool:
        try:
            response = await self._call(self.wire.live().request, min(_PROBE_S, deadline.remaining_s))
        except grpc.RpcError:
            return False
        return bool(response.live)

    def _open(self) -> Any:
        if self._channel is None:
            self._channel = open_channel(self._library, self._endpoint, self._compression)
        return self._channel


class GrpcTransport(_GrpcTransport):
    """Block the calling thread. Thread-safe."""

    _library = grpc
    _closed_errors = ValueError

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        super().__init__(endpoint, compression)
        self._open()  # before threads share it; it connects at its first call

    async def _invoke(self, method: Any, message: bytes, **options: Any) -> Any:
        return method(message, **options)

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        time.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return work()

    async def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()


class AsyncGrpcTransport(_GrpcTransport):
    """Wait in an event loop. Task-safe; belongs to the loop of its first call."""

    _library = grpc.aio
    _closed_errors = grpc.aio.UsageError

    async def _invoke(self, method: Any, message: bytes, **options: Any) -> Any:
        return await method(message, **options)

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        await asyncio.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._channel:
            await self._channel.close()


def open_channel(library: Any, endpoint: Endpoint, compression: Compression) -> Any:
    """Open a channel, which connects at its first call.

    Args:
        library: `grpc` or `grpc.aio`.
        endpoint: The server.
        compression: How requests are compressed.

    Raises:
        InvalidInput: The CA file or the client's certificate cannot be read.
    """
    limits = [("grpc.max_receive_message_length", infer_limit())]
    proxies = [("grpc.enable_http_proxy", 0)] if endpoint.is_local else []
    options: dict[str, Any] = {"options": [*_OPTIONS, *limits, *proxies]}
    if compression:
        options["compression"] = _COMPRESSION[compression]
    if not endpoint.is_secure:
        return library.insecure_channel(endpoint.authority, **options)
    endpoint.tls()  # its errors name what is wrong with the files
    key, certificate = endpoint.client_key or endpoint.client_cert, endpoint.client_cert
    credentials = grpc.ssl_channel_credentials(_read(endpoint.ca_file), _read(key), _read(certificate))
    return library.secure_channel(endpoint.authority, credentials, **options)


def translate_error(
    error: Any, endpoint: Endpoint, deadline: Deadline, request: GrpcRequest, *, reachable: bool
) -> ClientError:
    """A `grpc.RpcError` as one of the error tree; `reachable` is False if the server did not answer a probe either."""
    code, details = error.code(), error.details() or ""
    if not reachable:
        return failures.unreachable(endpoint, details, code.name)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return too_large(infer_limit())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return failures.deadline_exceeded(endpoint, deadline, code.name)
    return grpc_error(code, details, request.request_id)


def _may_be_unreachable(error: Any) -> bool:
    """True if the server may be out of reach: gRPC has one status for that and for a server's "not now"."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not needs_admin_key(error.details() or "")


def _to_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC sends them: names in lower case."""
    return tuple((name.lower(), value) for name, value in headers.items())


def _read(file: Path | None) -> bytes | None:
    return read_bytes(file, MIB) if file else None
