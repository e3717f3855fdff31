"""Calls with one deadline and retries, over any transport."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady, Overloaded, ProtocolError
from graphkiln_client.transports.base import Call, Deadline, InferRequest, InferResponse, Transport

_BASE_S, _CAP_S = 0.1, 5.0  # of the delay before another attempt

T = TypeVar("T")


class Connection:
    """Send calls until they succeed, fail for good, or the time is over.

    Args:
        transport: Sends them once.
        timeout_s: Seconds that each call may take, all its attempts together.
        max_retries: Further attempts after a failure that may pass.
    """

    def __init__(self, transport: Transport, timeout_s: float, max_retries: int) -> None:
        self.transport = transport
        self.wire = transport.wire
        self.timeout_s = timeout_s
        self._max_retries = max_retries
        self._extensions: frozenset[str] | None = None

    async def call(self, call: Call[T]) -> T:
        """Send a call that is the same at every attempt, and return its value.

        Raises:
            ClientError: The call failed.
        """
        return await self._attempt(lambda _: call)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Send an inference, with what is left of its time for the server.

        Raises:
            ClientError: The request failed.
        """
        binary = "binary_tensor_data" in (self._extensions or await self.extensions())
        return await self._attempt(lambda left_s: self.wire.infer(request, left_s, binary=binary))

    async def encode_once(self, request: InferRequest) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Encode an inference for many sendings.

        Returns:
            A function that sends it, as often as it is called, without retries.

        Raises:
            ClientError: The server cannot be reached, or the request cannot be encoded.
        """
        binary = "binary_tensor_data" in await self.extensions()
        call = self.wire.infer(request, self.timeout_s, binary=binary)
        return lambda: self.transport.send(call, Deadline.after(self.timeout_s))

    async def extensions(self) -> frozenset[str]:
        """The extensions of KServe v2 that the server speaks; requested once.

        Raises:
            ProtocolError: The server's metadata lists none.
            ClientError: The server cannot be reached.
        """
        if self._extensions is None:
            names: Any = (await self.call(self.wire.server_metadata())).get("extensions", [])
            if not isinstance(names, list):
                raise ProtocolError(f"the server's metadata has no list of extensions: {str(names)[:80]}")
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
    """Seconds to wait before the next attempt; None when the error is final.

    Connection failures, 429, 502, 503, 504 and gRPC's UNAVAILABLE and RESOURCE_EXHAUSTED are retried; every other
    error of the server is final, and so is a deadline.

    Args:
        error: The end of the attempt.
        attempt: Number of attempts before it.
        deadline: Of the whole call; a delay that would pass it is not begun.

    Source: M. Brooker, "Exponential Backoff And Jitter" (full jitter); RFC 9110, "Retry-After".
    """
    if not isinstance(error, ConnectionFailed | ModelNotReady | Overloaded):
        return None
    delay = error.retry_after_s
    if delay is None:
        delay = random.uniform(0, min(_CAP_S, _BASE_S * 2**attempt))  # noqa: S311 - spreads load, guards nothing
    return delay if delay < deadline.remaining_s else None
