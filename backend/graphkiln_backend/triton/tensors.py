"""Convert between Triton's tensors and numpy arrays, using DLPack for bf16.

`pb_utils` exposes bf16 only by DLPack, and numpy's DLPack does not support bf16, so the structures are read and written
here with ctypes.

Source: `dlpack.h` of DLPack 0.8 (`DLManagedTensor`, `DLDataTypeCode`).
"""

from __future__ import annotations

import ctypes
import math
from typing import Protocol

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import SignatureError

_BFLOAT = 4
_CPU = 1
_CAPSULE = b"dltensor"
_MOST_BYTES = 1 << 60  # Triton computes sizes in 64 bits: a shape that overflows them comes without data


class InputTensor(Protocol):
    """The part of a request's `pb_utils.Tensor` that is used."""

    def name(self) -> str:
        """Name of the input."""
        ...

    def as_numpy(self) -> AnyArray:
        """Content as an array; not for bf16."""
        ...

    def to_dlpack(self) -> object:
        """Content as a DLPack capsule."""
        ...


class ArrayTensor:
    """An array of any type, also bf16, with the interface of a request's tensor."""

    def __init__(self, name: str, array: AnyArray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        """Name of the input."""
        return self._name

    def as_numpy(self) -> AnyArray:
        """Return the array."""
        return self._array

    def to_dlpack(self) -> object:
        """Export a bf16 array as a DLPack capsule."""
        return to_dlpack(self._array)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

# Exported tensors by the address of their structure, kept alive until the consumer calls the deleter.
_exported: dict[int, object] = {}


def _release(address: int) -> None:
    _exported.pop(address, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)


def to_array(tensor: InputTensor, dtype: DType | None) -> AnyArray:
    """Read a tensor in CPU memory; the array owns its memory, as it may outlive the request or response.

    Args:
        tensor: A tensor of a request or response.
        dtype: Its element type, or None if the graph has no such tensor.
    """
    if dtype is not DType.BF16 or isinstance(tensor, ArrayTensor):
        return tensor.as_numpy()  # Triton copies it, too
    return from_dlpack(tensor.to_dlpack())


def from_dlpack(capsule: object) -> AnyArray:
    """Copy the contiguous bf16 tensor in a DLPack capsule.

    Raises:
        SignatureError: The shape is larger than any memory.
    """
    tensor = ctypes.cast(_get_pointer(capsule, _CAPSULE), ctypes.POINTER(_ManagedTensor)).contents.tensor
    dtype = DType.BF16.numpy
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes > _MOST_BYTES:
        raise SignatureError("the tensor is larger than any memory", expected="its true shape", got=str(list(shape)))
    if not size_bytes:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data + tensor.byte_offset)
    return np.frombuffer(memoryview(memory), dtype).reshape(shape).copy()


def to_dlpack(array: AnyArray) -> object:
    """Export a bf16 array as a DLPack capsule; the array is kept alive until the consumer calls the deleter."""
    array = np.ascontiguousarray(array)
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = _ManagedTensor(
        tensor=_Tensor(
            data=array.ctypes.data,
            device_type=_CPU,
            ndim=array.ndim,
            type_code=_BFLOAT,
            type_bits=16,
            type_lanes=1,
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        ),
        deleter=ctypes.cast(_DELETER, ctypes.c_void_p),
    )
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, array)
    capsule: object = _new_capsule(address, _CAPSULE, None)
    return capsule
