"""What every transport offers, and the values that pass through it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from graphkiln.graph.dtypes import AnyArray, DType
from graphkiln.graph.errors import ProtocolError


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        model: Model name.
        version: Model version, or empty for the one that the server chooses.
        inputs: Arrays by input name.
        outputs: Output name -> number of classes wanted from the classification extension, 0 for the plain tensor.
            Empty: all outputs, plain.
        request_id: Echoed by the server and shown in its logs.
    """

    model: str
    version: str
    inputs: Mapping[str, AnyArray]
    outputs: Mapping[str, int] = field(default_factory=dict)
    request_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferResponse:
    """One inference answer: who answered, and the arrays by output name."""

    model: str
    version: str
    outputs: Mapping[str, AnyArray]


class Transport(Protocol):
    """A connection to one server. Thread-safe.

    Every method raises the `ClientError` family only.
    """

    def ready(self, timeout_s: float) -> bool:
        """Whether every model of the server is ready."""
        ...

    def model_metadata(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """The model's KServe v2 metadata, as the JSON protocol shows it."""
        ...

    def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """The model's Triton configuration, as the JSON protocol shows it."""
        ...

    def model_statistics(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """The statistics of a model's versions, as the JSON protocol shows them."""
        ...

    def repository_index(self, timeout_s: float) -> list[dict[str, Any]]:
        """Every model version that the server knows, with its state."""
        ...

    def load(self, model: str, timeout_s: float) -> None:
        """Loads or reloads a model."""
        ...

    def unload(self, model: str, timeout_s: float) -> None:
        """Unloads a model; returns before it is gone."""
        ...

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Sends a request and waits for its answer."""
        ...

    def close(self) -> None:
        """Closes all connections."""
        ...


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


def raw_buffer(array: AnyArray) -> bytes | AnyArray:
    """A tensor's raw representation as a buffer: little-endian, C order; BYTES elements with 4-byte lengths.

    Returns:
        Something that `bytes.join` takes: the array itself where its memory is that representation already.

    Source: KServe v2 binary tensor data extension; `tritonclient.utils`.
    """
    if array.dtype.kind in "OSU":
        serialized = serialize_byte_tensor(array)
        return bytes(serialized.item()) if serialized.size else b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_bytes(raw: bytes | memoryview, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """The tensor of a raw representation; read-only where it is a view of the answer.

    Raises:
        ProtocolError: The bytes are not as many as dtype and shape ask for.
    """
    dtype = dtype_named(datatype)
    if any(size < 0 for size in shape):
        raise ProtocolError(f"a tensor of the answer has the shape {list(shape)}")
    try:
        if dtype is DType.BYTES:
            flat: AnyArray = deserialize_bytes_tensor(bytes(raw))
        else:
            flat = np.frombuffer(raw, dtype.numpy)
        return flat.reshape(shape)
    except Exception as error:
        raise ProtocolError(f"{len(raw)} bytes are not a {datatype} tensor of shape {list(shape)}") from error
