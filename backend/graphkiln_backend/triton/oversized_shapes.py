"""Refuse a request whose shape is too large for any array, instead of letting it end the server.

Triton (24.10) multiplies the sizes of a shape in 64 bits: of a tensor with variable dimensions, a shape such as
[1, 2^62] of FP32 has 2^64 bytes, which are 0, as many as an empty request sends. The Python stub makes an array of that
shape before it calls Python; numpy refuses, and the stub ends with an uncaught exception, and all requests of the
server with it. So the stub is handed another function to make arrays with, which makes an empty array of one more
dimension instead: it fits no input.

The stub looks the function up in numpy's table of C functions once, when it makes its first array, and calls what it
found from then on. Numpy itself and later extensions find numpy's own. Texts arrive by another way: see `text_shapes`.

Source: numpy C API, `PyArray_NewFromDescr`; pybind11, `npy_api::lookup`; Triton Python backend, `PbTensor`.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from graphkiln_backend.graph.signature import Signature

_MOST_ELEMENTS = 1 << 58  # no machine holds more; numpy counts bytes in 63 bits
_NEW_FROM_DESCR = 94  # place in the table, equal in all versions of the ABI. Source: numpy, `multiarray_funcs_api`
_MULTIARRAY = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core.multiarray"
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NewFromDescr = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,  # the new array
    ctypes.c_void_p,  # its type
    ctypes.c_void_p,  # its dtype: the function takes over the reference
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,  # strides
    ctypes.c_void_p,  # memory
    ctypes.c_int,
    ctypes.c_void_p,
)
_alive: list[object] = []  # functions that the stub may call


def needs_protection(signature: Signature, *, batching: bool) -> bool:
    """Whether a request can choose more than the batch size, which Triton itself limits.

    Args:
        signature: Inputs and outputs of the session.
        batching: Whether the first dimension of every tensor is the batch.
    """
    inputs = (*signature.inputs, *signature.optional_inputs)
    return any(isinstance(dim, str) for spec in inputs for dim in spec.shape[int(batching) :])


def protect_arrays(make_first_array: Callable[[], object]) -> None:
    """Make an extension create empty arrays in place of impossible ones; costs it about 1 us an array.

    Args:
        make_first_array: Has the extension make its first array, so that it looks numpy's functions up.
    """
    table = numpy_functions()
    before = table[_NEW_FROM_DESCR]
    make = _NewFromDescr(before)

    def make_possible(subtype: int, dtype: int, ndim: int, dims: Any, strides: int, *rest: int) -> Any:
        if math.prod([size or 1 for size in dims[:ndim]]) > _MOST_ELEMENTS:  # numpy refuses these, even with a 0
            empty = (ctypes.c_int64 * (ndim + 1))()
            return make(subtype, dtype, ndim + 1, empty, None, *rest)
        return make(subtype, dtype, ndim, dims, strides, *rest)

    function = _NewFromDescr(make_possible)
    _alive.append(function)
    table[_NEW_FROM_DESCR] = ctypes.cast(function, ctypes.c_void_p).value
    try:
        make_first_array()
    finally:
        table[_NEW_FROM_DESCR] = before


def numpy_functions() -> Any:
    """Numpy's table of C functions: a writable array of addresses."""
    capsule: object = vars(importlib.import_module(_MULTIARRAY))["_ARRAY_API"]
    return ctypes.cast(_get_pointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))
