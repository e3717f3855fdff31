"""Raw and plain representations of tensors in messages, and the protocol's datatype names."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError

_MAX_DIMENSIONS = 32  # numpy's limit
_COPIED_BYTES = 1 << 12  # up to this size a copy is faster than creating a view


def datatype_of(name: str, array: AnyArray) -> str:
    """Return the protocol's datatype of an input array.

    Raises:
        InvalidInput: The dtype is not supported.
    """
    try:
        return _datatype(array.dtype)
    except ManifestError as error:
        raise InvalidInput(f"input '{name}' cannot be sent: {error.message}", hint=error.hint) from error


@functools.cache
def parse_datatype(name: str) -> DType:
    """Parse the datatype in a response.

    Raises:
        ProtocolError: The datatype is unknown.
    """
    try:
        return DType(name)
    except ValueError:
        raise ProtocolError(f"the response has an unknown datatype {str(name)[:40]!r}") from None


def to_raw(array: AnyArray) -> bytes | memoryview:
    """Convert a tensor to its raw representation: little-endian, C order; BYTES elements with 4-byte lengths.

    Returns:
        A view of a large contiguous array, otherwise a copy.

    Source: KServe v2 binary tensor data extension; `tritonclient.utils`.
    """
    if array.dtype.kind in "OSU":
        serialized = serialize_byte_tensor(array.astype(np.object_))
        return bytes(serialized.item()) if serialized.size else b""
    if array.nbytes <= _COPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def from_raw(raw: bytes | memoryview, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """Convert a raw representation to a tensor.

    Returns:
        A read-only view of `raw`; for BYTES a new array.

    Raises:
        ProtocolError: The bytes do not match the datatype and the shape.
    """
    layout = _layout(datatype)
    _check_shape(shape)
    try:
        flat: AnyArray = np.frombuffer(raw, layout) if layout else deserialize_bytes_tensor(bytes(raw))
        return flat.reshape(shape)
    except Exception as error:
        raise ProtocolError(f"{len(raw)} bytes are not a {datatype} tensor of shape {list(shape)}") from error


def from_values(values: Any, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """Convert numbers or strings from JSON or protobuf, flat or nested, to a tensor.

    Raises:
        ProtocolError: The values do not match the datatype and the shape.
    """
    dtype = parse_datatype(datatype)
    _check_shape(shape)
    try:
        if dtype is DType.BYTES:
            elements = np.asarray(values, np.object_).ravel()
            encoded = [text if isinstance(text, bytes) else str(text).encode() for text in elements]
            return np.array(encoded, np.object_).reshape(shape)
        if dtype.numpy.kind in "iu":
            return _to_integers(values, dtype.numpy).reshape(shape)
        return np.asarray(values, dtype.numpy).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"the values are not a {datatype} tensor of shape {list(shape)}: {error}") from error


def _to_integers(values: Any, dtype: np.dtype[np.generic]) -> AnyArray:
    """Convert to integers; raise an error for values out of range, which numpy before 2.0 would wrap."""
    numbers: Any = np.asarray(values)
    if numbers.dtype.kind not in "iub":
        numbers = np.asarray(values, np.object_)  # numpy converts lists with numbers above 2**63 to floats
    limits = np.iinfo(dtype.str)
    if numbers.size and not limits.min <= numbers.min() <= numbers.max() <= limits.max:
        raise OverflowError(f"a value is out of the range of {dtype}")
    integers: AnyArray = numbers.astype(dtype)
    if not np.array_equal(integers, numbers):
        raise ValueError("a value is not an integer")
    return integers


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > _MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise ProtocolError(f"a tensor in the response has invalid shape {str(list(shape[:_MAX_DIMENSIONS]))[:80]}")


# Cached, because looking up enum members is slow.
@functools.cache
def _layout(datatype: str) -> np.dtype[np.generic] | None:
    """Return the numpy dtype of a datatype; None for BYTES."""
    dtype = parse_datatype(datatype)
    return None if dtype is DType.BYTES else dtype.numpy


@functools.cache
def _datatype(dtype: np.dtype[np.generic]) -> str:
    return DType.from_numpy(dtype).value
