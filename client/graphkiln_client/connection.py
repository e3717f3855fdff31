"""Calls over any transport, with a deadline and retries."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady, Overloaded, ProtocolError
from graphkiln_client.transports.base import Call, Deadline, InferRequest, InferResponse, Transport

_BACKOFF_BASE_S, _BACKOFF_CAP_S = 0.1, 5.0

T = TypeVar("T")


class Connection:
    """Send calls with retries until success, a permanent error, or the deadline.

    Args:
        transport: Sends each attempt.
        timeout_s: Deadline in seconds of a call, including its retries.
        max_retries: Maximum number of retries after transient errors.
    """

    def __init__(self, transport: Transport, timeout_s: float, max_retries: int) -> None:
        self.transport = transport
        self.wire = transport.wire
        self.timeout_s = timeout_s
        self._max_retries = max_retries
        self._extensions: frozenset[str] | None = None

    async def call(self, call: Call[T]) -> T:
        """Send a call and return its result.

        Raises:
            ClientError: The call failed.
        """
        return await self._attempt(lambda _: call)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Send an inference request; each attempt tells the server the remaining time.

        Raises:
            ClientError: The request failed.
        """
        binary = "binary_tensor_data" in (self._extensions or await self.extensions())
        return await self._attempt(lambda left_s: self.wire.infer(request, left_s, binary=binary))

    async def encode_once(self, request: InferRequest) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Encode an inference request once.

        Returns:
            A function that sends the request without retries, as often as it is called.

        Raises:
            ClientError: The server cannot be reached, or the request cannot be encoded.
        """
        binary = "binary_tensor_data" in await self.extensions()
        call = self.wire.infer(request, self.timeout_s, binary=binary)
        return lambda: self.transport.send(call, Deadline.after(self.timeout_s))

    async def extensions(self) -> frozenset[str]:
        """Return the KServe v2 extensions of the server; requested once.

        Raises:
            ProtocolError: The server's metadata is malformed.
            ClientError: The request failed.
        """
        if self._extensions is None:
            names: Any = (await self.call(self.wire.server_metadata())).get("extensions", [])
            if not isinstance(names, list):
                raise ProtocolError(f"expected a list of extensions in the server's metadata, got {str(names)[:80]}")
            self._extensions = frozenset(map(str, names))
        return self._extensions

    async def _attempt(self, build: Callable[[float], Call[T]]) -> T:
        deadline = Deadline.after(self.timeout_s)
        attempt = 0
        while True:
            try:
                return await self.transport.send(build(deadline.remaining_s), deadline)
            except ClientError as error:
                delay_s = retry_delay_s(error, attempt, deadline) if attempt < self._max_retries else None
                if delay_s is None:
                    raise
            attempt += 1
            await self.transport.sleep(delay_s)


def retry_delay_s(error: ClientError, attempt: int, deadline: Deadline) -> float | None:
    """Return the delay in seconds before the next attempt; None for a permanent error or a delay beyond the deadline.

    Connection failures, HTTP 429, 502, 503, 504 and gRPC UNAVAILABLE and RESOURCE_EXHAUSTED are retried.

    Args:
        error: Error of the last attempt.
        attempt: Number of attempts before it.
        deadline: Deadline of the whole call.

    Source: M. Brooker, "Exponential Backoff And Jitter" (full jitter); RFC 9110, "Retry-After".
    """
    if not isinstance(error, ConnectionFailed | ModelNotReady | Overloaded):
        return None
    delay = error.retry_after_s
    if delay is None:
        delay = random.uniform(0, min(_BACKOFF_CAP_S, _BACKOFF_BASE_S * 2**attempt))  # noqa: S311 - not for security
    return delay if delay < deadline.remaining_s else None
