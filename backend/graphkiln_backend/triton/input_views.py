"""Inputs of requests without a copy: arrays that view the memory which Triton shares with its Python stub.

The stub means to hand out views, but makes each array without an owner of its memory, and pybind11 copies what has
none: 600 kB for an image, once more. So it is given a function in the place of numpy's copy that hands out the array
itself. `PyObject_SelfIter` does just that: it takes a reference to its first argument and returns it.

Such an array can be read as long as its request lives. It cannot be written, and it lies wherever Triton put it, which
is seldom where its type should: what a runtime reads is copied once, into the batch (`executor`).

Source: Triton Python backend, `PbTensor`; pybind11, `array::array`, which ends in `PyArray_NewCopy`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from graphkiln_backend.triton.numpy_functions import NEW_COPY, call_with


def view_inputs(make_first_array: Callable[[], object]) -> None:
    """Calls what makes the first array of somebody, who from then on makes views of memory instead of copies."""
    call_with(NEW_COPY, ctypes.cast(ctypes.pythonapi.PyObject_SelfIter, ctypes.c_void_p), make_first_array)
