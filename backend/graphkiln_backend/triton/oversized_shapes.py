"""A request whose shape is too large for any array fails alone, and does not end the server.

Triton (24.10) multiplies the sizes of a shape in 64 bits. Of a tensor with dimensions that vary, a shape such as
[1, 2^62] of FP32 has 2^64 bytes, which are 0, as many as an empty request sends. The Python stub then makes an array of
that shape before it calls Python, numpy refuses, and the stub ends with an exception that nobody catches; with it go
all requests of the server. So the stub is handed another function to make arrays with (`numpy_functions`), which makes
an empty one of one dimension more instead: it fits no input.

Texts take another way, through `pb_utils.deserialize_bytes_tensor`.

Source: numpy C API, `PyArray_NewFromDescr`; Triton Python backend, `PbTensor`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.triton.numpy_functions import NEW_FROM_DESCR, call_with, table

_MOST_ELEMENTS = 1 << 58  # no machine holds more; numpy counts bytes in 63 bits
_Function = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,  # the new array
    ctypes.c_void_p,  # its type
    ctypes.c_void_p,  # its dtype: the reference is the function's
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,  # strides
    ctypes.c_void_p,  # memory
    ctypes.c_int,
    ctypes.c_void_p,
)
_kept: list[object] = []  # the functions that the stub holds


def needs_protection(signature: Signature, *, batching: bool) -> bool:
    """Whether a request can choose more than the batch size, which Triton limits itself.

    Args:
        signature: Of the session.
        batching: Whether the first dimension of every tensor is the batch.
    """
    inputs = (*signature.inputs, *signature.optional_inputs)
    return any(isinstance(dim, str) for spec in inputs for dim in spec.shape[int(batching) :])


def protect_arrays(make_first_array: Callable[[], object]) -> None:
    """Has whoever looks numpy's functions up in a call make empty arrays in place of impossible ones.

    Costs about a microsecond for every array that the caller makes from then on.

    Args:
        make_first_array: The call.
    """
    make = _Function(table()[NEW_FROM_DESCR])

    def make_possible(subtype: int, dtype: int, ndim: int, dims: Any, strides: int, *rest: int) -> Any:
        if math.prod([size or 1 for size in dims[:ndim]]) > _MOST_ELEMENTS:  # as numpy counts, whatever is 0
            empty = (ctypes.c_int64 * (ndim + 1))()
            return make(subtype, dtype, ndim + 1, empty, None, *rest)
        return make(subtype, dtype, ndim, dims, strides, *rest)

    ours = _Function(make_possible)
    _kept.append(ours)
    call_with(NEW_FROM_DESCR, ctypes.cast(ours, ctypes.c_void_p), make_first_array)


def protect_texts(deserialize: Callable[[AnyArray], AnyArray]) -> Callable[[AnyArray], AnyArray]:
    """A `deserialize_bytes_tensor` whose arrays are empty where they cannot have the shape that is requested."""

    def deserialize_possible(encoded: AnyArray) -> AnyArray:
        return deserialize(encoded).view(_Words)

    return deserialize_possible


class _Words(np.ndarray[Any, Any]):
    """An array that the stub gives the shape of the request."""

    def reshape(self, *shape: Any, **options: Any) -> AnyArray:
        plain = self.view(np.ndarray)
        sizes: Sequence[int] = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        possible = math.prod(sizes) == plain.size
        return plain.reshape(sizes, **options) if possible else np.empty([0] * (len(sizes) + 1), plain.dtype)
