"""Shapes that no array can have: numpy's function by which a C++ extension makes arrays, called as one would."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec
from graphkiln_backend.triton.oversized_shapes import needs_protection, numpy_functions, protect_arrays

MakeArray = Callable[..., np.ndarray]
FLOAT = np.dtype(np.float32)
NEW_FROM_DESCR = 94
take_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def look_up() -> int:
    """What an extension finds when it makes its first array."""
    address: int = numpy_functions()[NEW_FROM_DESCR]
    return address


@pytest.fixture
def make() -> MakeArray:
    found: list[int] = []
    protect_arrays(lambda: found.append(look_up()))
    typed = ctypes.PYFUNCTYPE(
        ctypes.py_object,
        *(ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    )(found[0])

    def make_array(*shape: int) -> np.ndarray:
        take_reference(FLOAT)  # which the function gives back
        made: np.ndarray = typed(np.ndarray, FLOAT, len(shape), (ctypes.c_int64 * len(shape))(*shape), None, None, 0, 0)
        return made

    return make_array


@pytest.mark.parametrize("shape", [(2, 3), (1,), (), (0, 2**40), (1, 1, 4)])
def test_a_possible_array_is_made_as_ever(make: MakeArray, shape: tuple[int, ...]) -> None:
    array = make(*shape)
    assert (array.shape, array.dtype) == (shape, FLOAT)


@pytest.mark.parametrize("shape", [(1, 2**62), (2**62,), (0, 2**62), (2**32, 2**32), (2**63 - 1,) * 3])
def test_an_impossible_one_is_empty_and_fits_no_input(make: MakeArray, shape: tuple[int, ...]) -> None:
    array = make(*shape)
    assert array.size == 0
    assert array.ndim == len(shape) + 1


def test_nothing_is_lost_and_nothing_is_freed_too_often(make: MakeArray) -> None:
    gc.collect()
    before = sys.getrefcount(FLOAT)
    for _ in range(100):
        make(2, 3)
        make(1, 2**62)
    gc.collect()
    assert abs(sys.getrefcount(FLOAT) - before) < 10


def test_numpy_itself_and_later_extensions_find_numpys_own() -> None:
    before = look_up()
    protect_arrays(lambda: None)
    assert look_up() == before
    with pytest.raises(ZeroDivisionError):
        protect_arrays(lambda: 1 / 0)
    assert look_up() == before


@pytest.mark.parametrize(
    ("shape", "batching", "needed"),
    [
        (("batch", 3), True, False),
        (("batch", "width"), True, True),
        ((4, 3), True, False),
        (("width",), False, True),
        ((4, 3), False, False),
        ((), False, False),
    ],
)
def test_only_dimensions_that_a_request_chooses_need_it(shape: tuple[Dim, ...], batching: bool, needed: bool) -> None:
    spec = TensorSpec(name="x", dtype=DType.FP32, shape=shape)
    assert needs_protection(Signature(inputs=(spec,), outputs=()), batching=batching) is needed
