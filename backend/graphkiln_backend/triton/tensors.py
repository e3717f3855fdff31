"""Arrays of Triton's tensors and back.

`pb_utils` knows no bf16 in numpy and hands it out by DLPack alone, which numpy for its part reads without bf16: the
structures are read and written here.

Source: `dlpack.h` of DLPack 0.8 (`DLManagedTensor`, `DLDataTypeCode`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.dtypes import AnyArray, DType

_BF16 = DType.BF16.numpy
_BFLOAT = 4
_CPU = 1
_CAPSULE = b"dltensor"


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


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

_exported: dict[int, object] = {}
"""What an exported tensor points to, by the address of its structure, until its consumer says that it is done."""


def _forget(address: int) -> None:
    _exported.pop(address, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


def to_array(tensor: Any, dtype: DType) -> AnyArray:
    """A view of an input tensor's memory, valid as long as its request.

    Args:
        tensor: A `pb_utils.Tensor`.
        dtype: Its element type.
    """
    if dtype is not DType.BF16:
        array: AnyArray = tensor.as_numpy()
        return array
    capsule = tensor.to_dlpack()
    found = ctypes.cast(_get_pointer(capsule, _CAPSULE), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(found.shape[axis] for axis in range(found.ndim))
    if 0 in shape:
        return np.empty(shape, dtype.numpy)
    size = int(np.prod(shape)) * dtype.numpy.itemsize
    memory = (ctypes.c_char * size).from_address(found.data + found.byte_offset)
    return np.frombuffer(memoryview(memory), dtype.numpy).reshape(shape)


def to_tensor(name: str, array: AnyArray) -> Any:
    """A `pb_utils.Tensor` of an array. Triton has no scalars: shape [] leaves as [1]."""
    if not array.ndim:
        array = array.reshape(1)
    if array.dtype != _BF16:
        return pb_utils.Tensor(name, array)
    array = np.ascontiguousarray(array)
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = _Managed(
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
    return pb_utils.Tensor.from_dlpack(name, _new_capsule(address, _CAPSULE, None))
