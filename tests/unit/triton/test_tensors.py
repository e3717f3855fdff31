"""Conversion of Triton's tensors, bf16 by DLPack; numpy is the other side."""

from __future__ import annotations

import ctypes
import gc
import sys

import ml_dtypes
import numpy as np
import pytest
from fake_triton import input_tensor, read_bf16, write_bf16
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import SignatureError
from graphkiln_backend.triton import tensors
from graphkiln_backend.triton.tensors import from_dlpack, to_array, to_dlpack

BF16 = np.dtype(ml_dtypes.bfloat16)


def bf16(*shape: int) -> np.ndarray:
    """Different numbers of 8 bits, which bf16 represents exactly."""
    return (np.arange(int(np.prod(shape))) % 256).reshape(shape).astype(BF16)


def test_other_types_are_views() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert to_array(input_tensor("x", array), DType.FP32) is array


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (2, 1, 4, 3)])
def test_bf16_of_another_library(shape: tuple[int, ...]) -> None:
    written = bf16(*shape)
    read = to_array(input_tensor("x", written), DType.BF16)
    assert read.dtype == BF16
    assert read.shape == shape
    np.testing.assert_array_equal(read, written)


def test_bf16_outlives_its_tensor() -> None:
    """Triton's other arrays do: a response of the tensor model is freed before its outputs are sent."""
    written = bf16(4)
    read = to_array(input_tensor("x", written), DType.BF16)
    written[2] = 200
    assert read[2] == 2


def test_byte_offset() -> None:
    buffer = bf16(10, 3)
    np.testing.assert_array_equal(from_dlpack(write_bf16(buffer[4:6])), buffer[4:6])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_empty_bf16_tensor(shape: tuple[int, ...]) -> None:
    read = from_dlpack(write_bf16(np.zeros(shape, BF16)))
    assert read.shape == shape
    assert read.dtype == BF16


def test_empty_tensor_without_memory() -> None:
    capsule = write_bf16(np.zeros((0, 3), BF16))
    data = ctypes.c_void_p.from_address(tensors._get_pointer(capsule, b"dltensor"))
    data.value = None
    assert from_dlpack(capsule).shape == (0, 3)


def test_impossible_shape_is_refused() -> None:
    capsule = write_bf16(np.zeros((1, 1), BF16))
    tensor = ctypes.cast(tensors._get_pointer(capsule, b"dltensor"), ctypes.POINTER(tensors._ManagedTensor)).contents
    tensor.tensor.shape[1] = 2**62
    with pytest.raises(SignatureError, match=r"larger than any memory.*\[1, 4611686018427387904\]"):
        from_dlpack(capsule)


def test_used_capsule_is_refused() -> None:
    capsule = to_dlpack(bf16(2))
    read_bf16(capsule)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        from_dlpack(capsule)


@given(hnp.arrays(np.uint16, hnp.array_shapes(min_dims=1, max_dims=4, max_side=5), elements=st.integers(0, 0xFFFF)))
def test_all_bit_patterns_are_exported(bits: np.ndarray) -> None:
    read = read_bf16(to_dlpack(bits.view(BF16)))
    np.testing.assert_array_equal(read.view(np.uint16), bits)


@pytest.mark.parametrize(
    "make",
    [lambda a: a.T, lambda a: a[::2], lambda a: a[:, 1:], lambda a: a[::-1]],
    ids=["transposed", "every second row", "columns", "reversed"],
)
def test_non_contiguous_array_is_exported(make) -> None:
    array = make(bf16(4, 3))
    np.testing.assert_array_equal(read_bf16(to_dlpack(array)), np.array(array))


def test_array_lives_until_its_consumer_is_done() -> None:
    array = bf16(3)
    references = sys.getrefcount(array)
    read = read_bf16(to_dlpack(array))
    assert sys.getrefcount(array) > references
    np.testing.assert_array_equal(read, [0, 1, 2])
    del read
    gc.collect()
    assert sys.getrefcount(array) == references
    assert not tensors._exported
