"""KServe v2 over gRPC, blocking, on grpcio."""

from __future__ import annotations

import time
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


class GrpcTransport:
    """One HTTP/2 channel to one gRPC endpoint. Thread-safe."""

    def __init__(self, endpoint: Endpoint, compression: Compression = "") -> None:
        self.wire = GrpcWire()
        self._endpoint = endpoint
        self._metadata = call_metadata(endpoint)
        self._channel = open_channel(grpc, endpoint, compression)
        self._methods: dict[str, Any] = {}

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """See `Transport.send`."""
        try:
            response = self._call(call.request, deadline.remaining_s)
        except grpc.RpcError as error:
            reachable = not may_be_unreachable(error) or self._is_live(deadline)
            raise translate_error(error, self._endpoint, deadline, call.request, reachable=reachable) from error
        return call.read(response)

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        time.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return work()

    async def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()

    def _call(self, request: GrpcRequest, timeout_s: float) -> Any:
        try:
            method = self._methods.get(request.method) or self._methods.setdefault(
                request.method, self._channel.unary_unary(request.method, _registered_method=True)
            )
            metadata = (*self._metadata, *admin_metadata(self._endpoint, request))
            response = method(request.message, timeout=timeout_s, metadata=metadata or None)
        except ValueError as error:  # how grpcio says that a channel is closed
            raise InvalidInput(f"the client of {self._endpoint} is closed") from error
        return parse_response(response, request)

    def _is_live(self, deadline: Deadline) -> bool:
        try:
            return bool(self._call(self.wire.live().request, min(PROBE_S, deadline.remaining_s)).live)
        except grpc.RpcError:
            return False
