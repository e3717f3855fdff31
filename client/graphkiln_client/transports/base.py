"""The interface of every transport, and the values that pass through it.

A protocol has two halves. Its `Wire` builds requests and reads responses, and does no I/O. Its transports send them:
one blocks, one waits in an event loop; both are written as coroutines (see `graphkiln_client.runner`).

What is made for every request is not frozen: making a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from graphkiln_backend.graph.dtypes import AnyArray, DType


@dataclass(kw_only=True, slots=True)
class Deadline:
    """One point in time for a whole call, however many attempts it takes.

    Attributes:
        timeout_s: Seconds from the start of the call.
        at: The end, on the clock of `time.monotonic()`.
    """

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """The deadline `timeout_s` seconds from now."""
        return cls(timeout_s=timeout_s, at=time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when the time is over."""
        return max(self.at - time.monotonic(), 0.0)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensor:
    """A tensor's place in a shared-memory region that the server knows.

    Attributes:
        region: The region's name.
        offset: Bytes before the tensor.
        size_bytes: Bytes of the tensor; of an output, the room for it.
        datatype: Element type.
        shape: Shape; empty for an output, whose shape the server decides.
    """

    region: str
    offset: int
    size_bytes: int
    datatype: DType
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedOutput:
    """An output that a request asks for.

    Attributes:
        class_count: Number of classes by the classification extension; 0 for the plain tensor.
        shared: Its place in shared memory; None to return it in the response.
    """

    class_count: int = 0
    shared: SharedTensor | None = None


PLAIN = RequestedOutput()


@dataclass(kw_only=True, slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        model: Model name.
        version: Model version, or empty for the one that the server chooses.
        inputs: Arrays by input name, or their places in shared memory.
        outputs: The requested outputs. Empty: all outputs, plain.
        request_id: Echoed by the server and shown in its logs.
        contract: Digest of the contract that it is made for: the server refuses it where another holds. Empty for any.
    """

    model: str
    version: str
    inputs: Mapping[str, AnyArray | SharedTensor]
    outputs: Mapping[str, RequestedOutput] = field(default_factory=dict)
    request_id: str = ""
    contract: str = ""

    def is_shared(self, output: str) -> bool:
        """True if the server puts an output into shared memory."""
        return output in self.outputs and self.outputs[output].shared is not None


@dataclass(kw_only=True, slots=True)
class InferResponse:
    """One inference response.

    Attributes:
        model: Name of the model that ran.
        version: Its version.
        outputs: Arrays by output name; read-only views of the response.
        shared_shapes: Shapes of the outputs that the server put into shared memory.
    """

    model: str
    version: str
    outputs: Mapping[str, AnyArray]
    shared_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Call(Generic[T]):
    """One call in a protocol's own form.

    Attributes:
        request: For the protocol's transport.
        read: Turns the transport's response into the call's value; raises the `ClientError` family only.
    """

    request: Any
    read: Callable[[Any], T]


class Wire(Protocol):
    """The calls of KServe v2 and Triton's extensions in one protocol. Pure: builds and reads, never sends."""

    def ready(self) -> Call[bool]:
        """True if every model of the server is ready."""
        ...

    def live(self) -> Call[bool]:
        """True if the server responds at all."""
        ...

    def server_metadata(self) -> Call[dict[str, Any]]:
        """The server's name, version and extensions, as the JSON protocol shows them."""
        ...

    def model_metadata(self, model: str, version: str) -> Call[dict[str, Any]]:
        """The model's KServe v2 metadata, as the JSON protocol shows it."""
        ...

    def model_config(self, model: str, version: str) -> Call[dict[str, Any]]:
        """The model's Triton configuration, as the JSON protocol shows it."""
        ...

    def model_statistics(self, model: str, version: str) -> Call[dict[str, Any]]:
        """The statistics of a model's versions, or of all models where it is empty, as the JSON protocol shows them."""
        ...

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """Every model version that the server knows, with its state."""
        ...

    def load(self, model: str, config: str = "") -> Call[None]:
        """Load or reload a model; `config` (JSON) replaces its configuration, unless it is empty."""
        ...

    def unload(self, model: str) -> Call[None]:
        """Unload a model; return before it is gone."""
        ...

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """Make a shared-memory region known to the server."""
        ...

    def region_status(self, name: str) -> Call[None]:
        """Fail if the server does not know the region."""
        ...

    def unregister_region(self, name: str) -> Call[None]:
        """Make the server forget a shared-memory region."""
        ...

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """An inference; the server learns how long the client waits.

        Args:
            request: The request.
            timeout_s: Seconds that are left of the call's time.
            binary: Send tensors as bytes beside the JSON header; gRPC always does so.
        """
        ...


class Transport(Protocol):
    """A connection to one server. Thread-safe, or task-safe in its event loop.

    Every method raises the `ClientError` family only.
    """

    @property
    def wire(self) -> Wire:
        """Builds and reads this transport's calls."""
        ...

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """Send a call once, wait for the response and return the call's value."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run CPU-bound work where it does not block other calls."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
