"""KServe v2 over gRPC in an event loop, on grpcio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports.base import Call
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.grpc_channel import (
    PROBE_S,
    admin_metadata,
    call_metadata,
    may_be_unreachable,
    open_channel,
    translate_error,
)
from graphkiln_client.transports.grpc_wire import GrpcRequest, GrpcWire, parse_response

T = TypeVar("T")


class AsyncGrpcTransport:
    """One HTTP/2 channel to one gRPC endpoint. Task-safe; belongs to the loop of its first call."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = GrpcWire()
        self._endpoint = endpoint
        self._compression: Compression = compression
        self._metadata = call_metadata(endpoint)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        try:
            response = await self._call(call.request, deadline.remaining_s)
        except grpc.RpcError as error:
            reachable = not may_be_unreachable(error) or await self._is_live(deadline)
            raise translate_error(error, self._endpoint, deadline, call.request, reachable=reachable) from error
        return call.read(response)

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

    async def _call(self, request: GrpcRequest, timeout_s: float) -> Any:
        try:
            method = self._methods.get(request.method) or self._methods.setdefault(
                request.method, self._open_channel().unary_unary(request.method, _registered_method=True)
            )
            metadata = (*self._metadata, *admin_metadata(self._endpoint, request))
            response = await method(request.message, timeout=timeout_s, metadata=metadata or None)
        except grpc.aio.UsageError as error:
            raise InvalidInput(f"the client of {self._endpoint} is closed") from error
        return parse_response(response, request)

    async def _is_live(self, deadline: Deadline) -> bool:
        try:
            response = await self._call(self.wire.live().request, min(PROBE_S, deadline.remaining_s))
        except grpc.RpcError:
            return False
        return bool(response.live)

    def _open_channel(self) -> Any:
        if self._channel is None:
            self._channel = open_channel(grpc.aio, self._endpoint, self._compression)
        return self._channel
