"""The functions by which Triton's Python stub makes arrays, and others in their places.

The stub finds them in numpy's table of C functions, all of them once, when it makes its first array: whatever the table
holds at that moment, it calls from then on. Numpy itself and later extensions find numpy's own.

Source: numpy C API; pybind11, `npy_api::lookup`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

# Places in the table. Source: numpy, `multiarray_funcs_api`; the places are the same in all versions of the ABI.
NEW_COPY, NEW_FROM_DESCR = 85, 94
_MULTIARRAY = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core.multiarray"
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def table() -> Any:
    """Numpy's table: an array of addresses, which can be written."""
    capsule: object = vars(importlib.import_module(_MULTIARRAY))["_ARRAY_API"]
    return ctypes.cast(_get_pointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))


def call_with(place: int, function: ctypes.c_void_p, call: Callable[[], object]) -> None:
    """Calls something while a place of the table holds another function.

    Args:
        place: Which one.
        function: The other one's address.
        call: Makes the first array of whoever is to find it.
    """
    functions = table()
    before = functions[place]
    functions[place] = function.value
    try:
        call()
    finally:
        functions[place] = before
