"""Impossible shapes: the array function that a C++ extension finds, and reshaping string tensors."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec
from graphkiln_backend.triton.oversized_shapes import needs_protection, numpy_functions, protect_arrays, protect_texts

MakeArray = Callable[..., np.ndarray]
FLOAT = np.dtype(np.float32)
NEW_FROM_DESCR = 94
take_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def look_up() -> int:
    """The address that an extension finds when it creates its first array."""
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
        take_reference(FLOAT)  # the function steals a reference
        made: np.ndarray = typed(np.ndarray, FLOAT, len(shape), (ctypes.c_int64 * len(shape))(*shape), None, None, 0, 0)
        return made

    return make_array


@pytest.mark.parametrize("shape", [(2, 3), (1,), (), (0, 2**40), (1, 1, 4)])
def test_possible_shape_is_unchanged(make: MakeArray, shape: tuple[int, ...]) -> None:
    array = make(*shape)
    assert (array.shape, array.dtype) == (shape, FLOAT)


@pytest.mark.parametrize("shape", [(1, 2**62), (2**62,), (0, 2**62), (2**32, 2**32), (2**63 - 1,) * 3])
def test_impossible_shape_gives_an_empty_array(make: MakeArray, shape: tuple[int, ...]) -> None:
    array = make(*shape)
    assert array.size == 0
    assert array.ndim == len(shape) + 1


def test_reference_counts(make: MakeArray) -> None:
    gc.collect()
    before = sys.getrefcount(FLOAT)
    for _ in range(100):
        make(2, 3)
        make(1, 2**62)
    gc.collect()
    assert abs(sys.getrefcount(FLOAT) - before) < 10


def test_table_is_restored() -> None:
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
def test_needs_protection(shape: tuple[Dim, ...], batching: bool, needed: bool) -> None:
    spec = TensorSpec(name="x", dtype=DType.FP32, shape=shape)
    assert needs_protection(Signature(inputs=(spec,), outputs=()), batching=batching) is needed


# String tensors.


class TestTexts:
    words = np.array([b"a", b"b"], np.object_)

    @pytest.mark.parametrize("shape", [[2], [1, 2], (2, 1)])
    def test_possible_shape_of_strings(self, shape: list[int]) -> None:
        shaped = protect_texts(lambda _: self.words)(np.zeros(2, np.uint8)).reshape(shape)
        assert type(shaped) is np.ndarray
        assert shaped.shape == tuple(shape)
        assert shaped.ravel().tolist() == [b"a", b"b"]

    def test_impossible_shape_of_strings(self) -> None:
        shaped = protect_texts(lambda _: self.words[:0])(np.zeros(0, np.uint8)).reshape([4, 2**62])
        assert shaped.shape == (0, 0, 0)
