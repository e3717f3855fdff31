"""Refuse requests whose shape is too large for any array, instead of letting them end the stub.

Triton (24.10) computes sizes in 64 bits, which overflow for tensors with variable dimensions. The Python stub creates
an array of the requested shape before it calls Python; numpy refuses, and the uncaught exception ends the stub and with
it all requests of the server. So the stub gets a wrapper of numpy's function that creates arrays: for impossible shapes
it returns an empty array with one more dimension, which matches no input.

The stub looks the function up in numpy's table of C functions once, when it creates its first array. The table is
restored afterwards, so that numpy itself and other extensions use the original.

String tensors take another path before 25.10: the stub reshapes the result of `pb_utils.deserialize_bytes_tensor`, and
exits if that raises. So their arrays return an empty array for an impossible shape, too.

Source: numpy C API, `PyArray_NewFromDescr`; pybind11, `npy_api::lookup`; Triton Python backend, `PbTensor`.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.triton.features import Feature, TritonFeatures

_MOST_ELEMENTS = 1 << 58  # more than any machine's memory; numpy counts bytes in 63 bits
_NEW_FROM_DESCR = 94  # index in the table, the same in all ABI versions. Source: numpy, `multiarray_funcs_api`
_MULTIARRAY = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core.multiarray"
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NewFromDescr = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,  # the new array
    ctypes.c_void_p,  # its type
    ctypes.c_void_p,  # its dtype; the function steals the reference
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,  # strides
    ctypes.c_void_p,  # memory
    ctypes.c_int,
    ctypes.c_void_p,
)
_alive: list[object] = []  # functions that the stub may call must not be freed


def protect_stub(pb_utils: Any, signature: Signature, *, batching: bool) -> None:
    """Protect this stub if requests can choose dimensions; to be called before it creates its first array.

    Args:
        pb_utils: The module `triton_python_backend_utils`.
        signature: Inputs and outputs of the session.
        batching: The first dimension of every tensor is the batch.
    """
    if needs_protection(signature, batching=batching):
        if not TritonFeatures.of_this_stub().has(Feature.TEXTS_IN_CPP):
            pb_utils.deserialize_bytes_tensor = protect_texts(pb_utils.deserialize_bytes_tensor)
        protect_arrays(partial(pb_utils.Tensor, "first", np.zeros(1, np.float32)))


def needs_protection(signature: Signature, *, batching: bool) -> bool:
    """Check for dimensions that a request can choose, other than the batch, which Triton limits.

    Args:
        signature: Inputs and outputs of the session.
        batching: The first dimension of every tensor is the batch.
    """
    inputs = (*signature.inputs, *signature.optional_inputs)
    return any(isinstance(dim, str) for spec in inputs for dim in spec.shape[int(batching) :])


def protect_arrays(make_first_array: Callable[[], object]) -> None:
    """Make an extension create empty arrays in place of impossible ones; adds about 1 us per array.

    Args:
        make_first_array: Makes the extension create its first array, and so look numpy's functions up.
    """
    table = numpy_functions()
    before = table[_NEW_FROM_DESCR]
    make = _NewFromDescr(before)

    def make_possible(subtype: int, dtype: int, ndim: int, dims: Any, strides: int, *rest: int) -> Any:
        if math.prod([size or 1 for size in dims[:ndim]]) > _MOST_ELEMENTS:  # numpy refuses these even with a 0
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
    """Return numpy's table of C functions, a writable array of addresses."""
    capsule: object = vars(importlib.import_module(_MULTIARRAY))["_ARRAY_API"]
    return ctypes.cast(_get_pointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))


def protect_texts(deserialize: Callable[[AnyArray], AnyArray]) -> Callable[[AnyArray], AnyArray]:
    """Wrap `deserialize_bytes_tensor`: reshaping its arrays to an impossible shape gives an empty array."""
    return lambda encoded: deserialize(encoded).view(_Strings)


class _Strings(np.ndarray[Any, Any]):
    """Strings that the stub is about to reshape."""

    def reshape(self, *shape: Any, **options: Any) -> AnyArray:
        plain = self.view(np.ndarray)
        sizes: Sequence[int] = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        possible = math.prod(sizes) == plain.size
        return plain.reshape(sizes, **options) if possible else np.empty([0] * (len(sizes) + 1), plain.dtype)
