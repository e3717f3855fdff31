"""What every transport offers, and the values that pass through it.

A protocol has two halves. Its `Wire` knows what a call looks like and how its answer reads, and does no I/O. Its
transports move the calls: one blocks, one waits in an event loop; both are written as coroutines (see
`graphkiln_client.driving`).

What is made for every request is not frozen: making a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError
from graphkiln_client.deadline import Deadline

T = TypeVar("T")

_COPIED_BYTES = 1 << 12
"""Up to here a copy costs less than the four steps to a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensor:
    """Where a tensor lies in a shared-memory region that the server knows.

    Attributes:
        region: The region's name.
        offset: Bytes before the tensor.
        size_bytes: Bytes of the tensor, or the room for it.
        datatype: Element type.
        shape: Shape; empty for an output, whose shape the server tells.
    """

    region: str
    offset: int
    size_bytes: int
    datatype: DType
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How an output shall come.

    Attributes:
        classes: How many answers of the classification extension; 0 for the plain tensor.
        place: Where in shared memory the server shall put it; None for "in the answer".
    """

    classes: int = 0
    place: SharedTensor | None = None


PLAIN = Wanted()


@dataclass(kw_only=True, slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        model: Model name.
        version: Model version, or empty for the one that the server chooses.
        inputs: Arrays by input name, or where they lie in shared memory.
        outputs: The outputs wanted. Empty: all outputs, plain.
        request_id: Echoed by the server and shown in its logs.
    """

    model: str
    version: str
    inputs: Mapping[str, AnyArray | SharedTensor]
    outputs: Mapping[str, Wanted] = field(default_factory=dict)
    request_id: str = ""

    def places(self, output: str) -> bool:
        """Whether the server was told to put an output into shared memory."""
        return output in self.outputs and self.outputs[output].place is not None


@dataclass(kw_only=True, slots=True)
class InferResponse:
    """One inference answer: who answered, and the arrays by output name.

    Attributes:
        model: Model name.
        version: Model version.
        outputs: Arrays that came in the answer.
        placed: Shapes of the outputs that the server put into shared memory.
    """

    model: str
    version: str
    outputs: Mapping[str, AnyArray]
    placed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Call(Generic[T]):
    """One call in a protocol's own form.

    Attributes:
        message: What the protocol's transport sends.
        read: From what it receives to the call's value; raises the `ClientError` family only.
    """

    message: Any
    read: Callable[[Any], T]


class Wire(Protocol):
    """The calls of KServe v2 and Triton's extensions in one protocol. Pure: builds and reads, never sends."""

    def ready(self) -> Call[bool]:
        """Whether every model of the server is ready."""
        ...

    def live(self) -> Call[bool]:
        """Whether the server answers at all."""
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
        """The statistics of a model's versions, as the JSON protocol shows them."""
        ...

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """Every model version that the server knows, with its state."""
        ...

    def load(self, model: str) -> Call[None]:
        """Loads or reloads a model."""
        ...

    def unload(self, model: str) -> Call[None]:
        """Unloads a model; returns before it is gone."""
        ...

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """Makes a shared-memory region known to the server."""
        ...

    def region_status(self, name: str) -> Call[None]:
        """Fails when the server does not know the region."""
        ...

    def unregister_region(self, name: str) -> Call[None]:
        """Makes the server forget a shared-memory region."""
        ...

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """An inference; the server is told how long its answer is waited for.

        Args:
            request: The request.
            timeout_s: What is left of the call's time.
            binary: Whether tensors may travel as bytes beside the JSON header; gRPC always does so.
        """
        ...


class Transport(Protocol):
    """A connection to one server. Thread-safe, or task-safe in its event loop.

    Every method raises the `ClientError` family only.
    """

    @property
    def wire(self) -> Wire:
        """What builds and reads this transport's calls."""
        ...

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """Sends a call once and waits for its answer."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Runs work of the CPU where it does not keep others from their answers."""
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


def datatype_of(name: str, array: AnyArray) -> str:
    """The wire's name of an array's dtype.

    Raises:
        InvalidInput: Arrays of that dtype cannot be sent.
    """
    try:
        return _name(array.dtype)
    except ManifestError as error:
        raise InvalidInput(f"input '{name}' cannot be sent: {error.message}", hint=error.hint) from error


@functools.cache
def dtype_named(name: str) -> DType:
    """The dtype of a name on the wire.

    Raises:
        ProtocolError: The server speaks of a type that the protocol does not have.
    """
    try:
        return DType(name)
    except ValueError:
        raise ProtocolError(f"the server answers with an unknown datatype {name!r}") from None


def raw_buffer(array: AnyArray) -> bytes | memoryview:
    """A tensor's raw representation as a buffer: little-endian, C order; BYTES elements with 4-byte lengths.

    Returns:
        A view of the array where its memory is that representation already and large, else a copy.

    Source: KServe v2 binary tensor data extension; `tritonclient.utils`.
    """
    if array.dtype.kind in "OSU":
        serialized = serialize_byte_tensor(array.astype(np.object_))
        return bytes(serialized.item()) if serialized.size else b""
    if array.nbytes <= _COPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def from_bytes(raw: bytes | memoryview, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """The tensor of a raw representation; read-only where it is a view of the answer.

    Raises:
        ProtocolError: The bytes are not as many as dtype and shape ask for.
    """
    layout = _layout(datatype)
    if min(shape, default=0) < 0:
        raise ProtocolError(f"a tensor of the answer has the shape {list(shape)}")
    try:
        flat: AnyArray = np.frombuffer(raw, layout) if layout else deserialize_bytes_tensor(bytes(raw))
        return flat.reshape(shape)
    except Exception as error:
        raise ProtocolError(f"{len(raw)} bytes are not a {datatype} tensor of shape {list(shape)}") from error


# Cached, because members of an enumeration are found by Python code, at each request anew.
@functools.cache
def _layout(datatype: str) -> np.dtype[np.generic] | None:
    """How the elements of a datatype lie in memory; None for texts."""
    dtype = dtype_named(datatype)
    return None if dtype is DType.BYTES else dtype.numpy


@functools.cache
def _name(dtype: np.dtype[np.generic]) -> str:
    return DType.from_numpy(dtype).value
