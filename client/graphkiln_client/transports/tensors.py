"""Tensors in their raw representation, which both protocols carry, and the names of their datatypes."""

from __future__ import annotations

import functools

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError

_COPIED_BYTES = 1 << 12
"""Up to here a copy costs less than the four steps to a view."""


def datatype_of(name: str, array: AnyArray) -> str:
    """The protocol's name of an array's dtype.

    Args:
        name: Name of the input, for the error.
        array: The input.

    Raises:
        InvalidInput: Arrays of that dtype cannot be sent.
    """
    try:
        return _datatype(array.dtype)
    except ManifestError as error:
        raise InvalidInput(f"input '{name}' cannot be sent: {error.message}", hint=error.hint) from error


@functools.cache
def parse_datatype(name: str) -> DType:
    """The dtype that a response names.

    Raises:
        ProtocolError: The protocol has no such type.
    """
    try:
        return DType(name)
    except ValueError:
        raise ProtocolError(f"the response has an unknown datatype {name!r}") from None


def to_raw(array: AnyArray) -> bytes | memoryview:
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


def from_raw(raw: bytes | memoryview, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """The tensor of a raw representation.

    Returns:
        A read-only view of `raw`; for BYTES an array of its own.

    Raises:
        ProtocolError: The bytes do not fit the datatype and the shape.
    """
    layout = _layout(datatype)
    if min(shape, default=0) < 0:
        raise ProtocolError(f"a tensor of the response has the shape {list(shape)}")
    try:
        flat: AnyArray = np.frombuffer(raw, layout) if layout else deserialize_bytes_tensor(bytes(raw))
        return flat.reshape(shape)
    except Exception as error:
        raise ProtocolError(f"{len(raw)} bytes are not a {datatype} tensor of shape {list(shape)}") from error


# Cached, because members of an enumeration are found by Python code, at each request anew.
@functools.cache
def _layout(datatype: str) -> np.dtype[np.generic] | None:
    """How the elements of a datatype lie in memory; None for BYTES."""
    dtype = parse_datatype(datatype)
    return None if dtype is DType.BYTES else dtype.numpy


@functools.cache
def _datatype(dtype: np.dtype[np.generic]) -> str:
    return DType.from_numpy(dtype).value
