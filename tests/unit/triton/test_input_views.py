"""Inputs without a copy: the function that the stub finds in the place of numpy's copy, called as the stub does."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from graphkiln_backend.triton.model import view_inputs
from graphkiln_backend.triton.numpy_functions import NEW_COPY, table


def test_what_would_be_copied_is_handed_out_itself() -> None:
    found: list[int] = []
    view_inputs(lambda: found.append(table()[NEW_COPY]))
    copy = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_int)(found[0])
    array = np.arange(3.0)
    references = sys.getrefcount(array)
    assert copy(array, -1) is array
    assert sys.getrefcount(array) == references
