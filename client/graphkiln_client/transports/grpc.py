"""KServe v2 over gRPC, blocking and in an event loop, on grpcio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports.base import Call
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.grpc_wire import GrpcMessage, GrpcWire, grpc_error, parsed

T = TypeVar("T")

_PROBE_S = 1.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # retries are the client's, under its deadline
    # By default a channel that could not connect refuses calls for a second, later for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_COMPRESSION = {
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


class GrpcTransport:
    """One HTTP/2 channel to one gRPC endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = GrpcWire()
        self._endpoint = endpoint
        self._metadata = _metadata(endpoint)
        self._channel = _open(grpc, endpoint, compression)
        self._methods: dict[str, Any] = {}

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        try:
            answer = self._call(call.message, deadline.remaining_s)
        except grpc.RpcError as error:
            reachable = not _may_be_unreachable(error) or self._answers(deadline)
            raise _translated(error, self._endpoint, deadline, call.message, reachable=reachable) from error
        return call.read(answer)

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        time.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return work()

    async def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()

    def _call(self, message: GrpcMessage, timeout_s: float) -> Any:
        try:
            method = self._methods.get(message.method) or self._methods.setdefault(
                message.method, self._channel.unary_unary(message.method, _registered_method=True)
            )
            answer = method(message.request, timeout=timeout_s, metadata=self._metadata or None)
        except ValueError as error:  # grpcio's word for a closed channel
            raise InvalidInput(f"the client of {self._endpoint} is closed") from error
        return parsed(answer, message)

    def _answers(self, deadline: Deadline) -> bool:
        try:
            return bool(self._call(self.wire.live().message, min(_PROBE_S, deadline.remaining_s)).live)
        except grpc.RpcError:
            return False


class AsyncGrpcTransport:
    """One HTTP/2 channel to one gRPC endpoint. Task-safe; belongs to the loop of its first call."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = GrpcWire()
        self._endpoint = endpoint
        self._compression: Compression = compression
        self._metadata = _metadata(endpoint)
        self._made: Any = None
        self._methods: dict[str, Any] = {}

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        try:
            answer = await self._call(call.message, deadline.remaining_s)
        except grpc.RpcError as error:
            reachable = not _may_be_unreachable(error) or await self._answers(deadline)
            raise _translated(error, self._endpoint, deadline, call.message, reachable=reachable) from error
        return call.read(answer)

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

    async def _call(self, message: GrpcMessage, timeout_s: float) -> Any:
        try:
            method = self._methods.get(message.method) or self._methods.setdefault(
                message.method, self._channel().unary_unary(message.method, _registered_method=True)
            )
            answer = await method(message.request, timeout=timeout_s, metadata=self._metadata or None)
        except grpc.aio.UsageError as error:
            raise InvalidInput(f"the client of {self._endpoint} is closed") from error
        return parsed(answer, message)

    async def _answers(self, deadline: Deadline) -> bool:
        try:
            answer = await self._call(self.wire.live().message, min(_PROBE_S, deadline.remaining_s))
        except grpc.RpcError:
            return False
        return bool(answer.live)

    def _channel(self) -> Any:
        if self._made is None:
            self._made = _open(grpc.aio, self._endpoint, self._compression)
        return self._made


def _open(library: Any, endpoint: Endpoint, compression: Compression) -> Any:
    options: dict[str, Any] = {"options": _OPTIONS}
    if compression:
        options["compression"] = _COMPRESSION[compression]
    if not endpoint.is_secure:
        return library.insecure_channel(endpoint.authority, **options)
    endpoint.tls()  # says what is wrong with the CA file
    authorities = endpoint.ca_file.read_bytes() if endpoint.ca_file else None
    return library.secure_channel(endpoint.authority, grpc.ssl_channel_credentials(authorities), **options)


def _metadata(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in endpoint.headers.items())


def _may_be_unreachable(error: Any) -> bool:
    """GRPC has one status for "nobody answers" and for "the server says: not now"."""
    return bool(error.code() is grpc.StatusCode.UNAVAILABLE)


def _translated(
    error: Any, endpoint: Endpoint, deadline: Deadline, message: GrpcMessage, *, reachable: bool
) -> ClientError:
    code, details = error.code(), error.details() or ""
    if not reachable:
        return ConnectionFailed(
            f"cannot reach {endpoint}: {details}",
            hint="is the server running? graphkiln health --url URL",
            status=code.name,
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no answer from {endpoint} within {deadline.timeout_s:g} s", status=code.name)
    return grpc_error(code, details, message.request_id)
