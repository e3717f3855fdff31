"""A connection as the clients use it: calls with one deadline and retries, whatever the protocol."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client.deadline import Deadline
from graphkiln_client.retries import Retries
from graphkiln_client.transports.base import Call, InferRequest, InferResponse, Transport

T = TypeVar("T")


class Connection:
    """Sends calls until they succeed, fail for good, or the time is over.

    Args:
        transport: What moves them.
        timeout_s: Seconds that one call may take, all its attempts together.
        max_retries: Further attempts after a failure that may pass.
    """

    def __init__(self, transport: Transport, timeout_s: float, max_retries: int) -> None:
        self.transport = transport
        self.wire = transport.wire
        self.timeout_s = timeout_s
        self._retries = Retries(max_retries)
        self._extensions: frozenset[str] | None = None

    async def call(self, call: Call[T]) -> T:
        """The answer to a call that looks the same at every attempt."""
        return await self._attempt(lambda _: call)

    async def infer(self, request: InferRequest) -> InferResponse:
        """The answer to an inference; the server is told what is left of the time.

        Raises:
            ClientError: The request did not get its answer.
        """
        binary = "binary_tensor_data" in (self._extensions or await self.extensions())
        return await self._attempt(lambda left_s: self.wire.infer(request, left_s, binary=binary))

    async def prepared(self, request: InferRequest) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Sends a request that is encoded once, as often as it is called, without retries."""
        binary = "binary_tensor_data" in await self.extensions()
        call = self.wire.infer(request, self.timeout_s, binary=binary)
        return lambda: self.transport.send(call, Deadline.after(self.timeout_s))

    async def extensions(self) -> frozenset[str]:
        """The extensions of KServe v2 that the server speaks; asked for once."""
        if self._extensions is None:
            names: Any = (await self.call(self.wire.server_metadata())).get("extensions", [])
            self._extensions = frozenset(map(str, names))
        return self._extensions

    async def _attempt(self, build: Callable[[float], Call[T]]) -> T:
        deadline = Deadline.after(self.timeout_s)
        attempt = 0
        while True:
            try:
                return await self.transport.send(build(deadline.remaining_s), deadline)
            except ClientError as error:
                delay_s = self._retries.delay_s(error, attempt, deadline)
                if delay_s is None:
                    raise
            attempt += 1
            await self.transport.sleep(delay_s)
