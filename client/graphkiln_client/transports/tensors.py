"""Tensors in their raw representation, which both protocols carry, and the names of their datatypes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError

_MOST_DIMENSIONS = 32  # of numpy's arrays
_COPIED_BYTES = 1 << 12  # up to here a copy costs less than the four steps to a view


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
        raise ProtocolError(f"the response has an unknown datatype {str(name)[:40]!r}") from None


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
        A read-only view of `raw`; for BYTES a new array.

    Raises:
        ProtocolError: The bytes do not fit the datatype and the shape.
    """
    layout = _layout(datatype)
    _check_shape(shape)
    try:
        flat: AnyArray = np.frombuffer(raw, layout) if layout else deserialize_bytes_tensor(bytes(raw))
        return flat.reshape(shape)
    except Exception as error:
        raise ProtocolError(f"{len(raw)} bytes are not a {datatype} tensor of shape {list(shape)}") from error


def from_values(values: Any, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    """The tensor of plain numbers or strings, as JSON and protobuf hold them.

    Args:
        values: The elements, flat or nested.
        datatype: The protocol's name of their type.
        shape: Shape of the tensor.

    Raises:
        ProtocolError: The values do not fit the datatype and the shape.
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
    """Integers of that type and of the same values: numpy before 2.0 wraps what is out of range."""
    numbers: Any = np.asarray(values)
    if numbers.dtype.kind not in "iub":
        numbers = np.asarray(values, np.object_)  # numpy makes floats of a list with numbers above 2**63
    limits = np.iinfo(dtype.str)
    if numbers.size and not limits.min <= numbers.min() <= numbers.max() <= limits.max:
        raise OverflowError(f"a value is out of the range of {dtype}")
    integers: AnyArray = numbers.astype(dtype)
    if not np.array_equal(integers, numbers):
        raise ValueError("a value is not an integer")
    return integers


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
        raise ProtocolError(f"a tensor of the response has the shape {str(list(shape[:_MOST_DIMENSIONS]))[:80]}")


# Cached, because members of an enumeration are found by Python code, at each request anew.
@functools.cache
def _layout(datatype: str) -> np.dtype[np.generic] | None:
    """Memory layout of the elements of a datatype; None for BYTES."""
    dtype = parse_datatype(datatype)
    return None if dtype is DType.BYTES else dtype.numpy


@functools.cache
def _datatype(dtype: np.dtype[np.generic]) -> str:
    return DType.from_numpy(dtype).value
