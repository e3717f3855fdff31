"""Precisions: element types, and which can be lowered to which."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.precision import SAVED, Precision


@pytest.mark.parametrize(
    ("precision", "dtype", "size"),
    [
        ("fp32", np.float32, 4),
        ("tf32", np.float32, 4),  # four bytes in memory, a short mantissa in the tensor cores only
        ("fp16", np.float16, 2),
        ("bf16", ml_dtypes.bfloat16, 2),
        ("int8", np.int8, 1),
    ],
)
def test_element_types(precision: str, dtype: type[np.generic], size: int) -> None:
    parsed = Precision(precision)
    assert parsed.numpy == np.dtype(dtype)
    assert parsed.bytes == size == np.zeros(1, parsed.numpy).nbytes
    assert DType.from_numpy(parsed.numpy) is parsed.dtype


def test_halves_and_integers() -> None:
    halves = {precision for precision in Precision if precision.is_half}
    integers = {precision for precision in Precision if precision.is_integer}
    assert halves == {Precision.FP16, Precision.BF16}
    assert integers == {Precision.INT8}
    assert all(precision.dtype.is_float != precision.is_integer for precision in Precision)
    assert all(precision.bytes == 2 for precision in halves)


def test_lowers_to() -> None:
    pairs = {(a, b) for a, b in itertools.product(Precision, repeat=2) if a.lowers_to(b)}
    assert pairs == {(Precision.FP32, Precision.FP16), (Precision.FP32, Precision.BF16)}


def test_tf32_uses_the_kernels_of_fp32() -> None:
    assert Precision.TF32.kernels is Precision.FP32
    assert all(precision.kernels is precision for precision in SAVED)


def test_tf32_is_never_stored() -> None:
    assert set(Precision) - set(SAVED) == {Precision.TF32}


def test_text() -> None:
    assert [str(precision) for precision in Precision] == ["fp32", "tf32", "fp16", "bf16", "int8"]
    assert f"{Precision.BF16}" == "bf16"
    assert {Precision.FP16: 1}["fp16"] == 1, "labels of metrics and keys of files are plain strings"
