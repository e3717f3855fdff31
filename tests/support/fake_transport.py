"""A transport without a server: every call is recorded and answered from a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphkiln_client.transports.base import Call, Deadline, InferRequest, InferResponse

EXTENSIONS = ["binary_tensor_data", "model_configuration"]


@dataclass(frozen=True)
class Request:
    """A call of `Wire`, by name."""

    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


class FakeWire:
    """Build a `Request` of any call; its response is the value of the call."""

    def __getattr__(self, name: str) -> Callable[..., Call[Any]]:
        return lambda *arguments, **options: Call(Request(name, arguments, options), lambda response: response)


class FakeTransport:
    """Answer from a table: by name a value, an error, a function of the arguments, or a list of these.

    Of a list, each call takes the next; the last one stays.

    Attributes:
        requests: All calls in order.
        delays_s: What was slept.
        closed: Whether it was closed.
    """

    def __init__(self, responses: Mapping[str, Any] | None = None, *, suspends: bool = False) -> None:
        self.wire: Any = FakeWire()
        self.responses = {"server_metadata": {"extensions": EXTENSIONS}, **(responses or {})}
        self.requests: list[Request] = []
        self.deadlines: list[Deadline] = []
        self.delays_s: list[float] = []
        self.closed = False
        self._suspends = suspends

    async def send(self, call: Call[Any], deadline: Deadline) -> Any:
        if self._suspends:
            await asyncio.sleep(0)
        request: Request = call.request
        self.requests.append(request)
        self.deadlines.append(deadline)
        response = self.responses[request.name]
        if isinstance(response, list) and request.name != "repository_index":
            response = response.pop(0) if len(response) > 1 else response[0]
        if isinstance(response, Exception):
            raise response
        return call.read(response(*request.arguments) if callable(response) else response)

    async def sleep(self, seconds: float) -> None:
        self.delays_s.append(seconds)

    async def compute(self, work: Callable[[], Any]) -> Any:
        return work()

    async def close(self) -> None:
        self.closed = True

    def sent(self, name: str) -> list[Request]:
        """All calls of a name."""
        return [request for request in self.requests if request.name == name]

    def inferred(self) -> list[InferRequest]:
        """All inference requests."""
        return [request.arguments[0] for request in self.sent("infer")]


def echo(request: InferRequest, timeout_s: float) -> InferResponse:
    """Return the inputs as outputs."""
    del timeout_s
    outputs = {name: np.asarray(array) for name, array in request.inputs.items()}
    return InferResponse(model=request.model, version=request.version or "1", outputs=outputs)
