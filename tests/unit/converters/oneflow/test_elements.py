"""The three names of an element type in OneFlow's files."""

from __future__ import annotations

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.elements import BY_PROTO_NAME, dtype_from_mlir, dtype_from_number

NUMPY = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i1": np.bool_,
    "i8": np.int8,
    "si8": np.int8,
    "i32": np.int32,
    "si64": np.int64,
    "ui8": np.uint8,
    "ui32": np.uint32,
}


@pytest.mark.parametrize("element", NUMPY)
def test_mlir_names_bits_and_sign(element: str) -> None:
    assert dtype_from_mlir(element).numpy == np.dtype(NUMPY[element])


def test_bfloat16_has_eight_bits_less_mantissa_than_a_float() -> None:
    assert dtype_from_mlir("bf16") is DType.BF16
    assert dtype_from_mlir("bf16").numpy.itemsize == 2


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "kFloat"), (3, "kDouble"), (4, "kInt8"), (6, "kInt64"), (9, "kFloat16"), (11, "kBFloat16"), (12, "kBool")],
)
def test_numbers_and_names_of_the_enumeration_agree(number: int, name: str) -> None:
    """As in OneFlow's data_type.proto."""
    assert dtype_from_number(number) is BY_PROTO_NAME[name]


@pytest.mark.parametrize("element", ["index", "f8E4M3", "none", "", "F32", "i4"])
def test_an_unknown_element_names_the_known_ones(element: str) -> None:
    with pytest.raises(ConversionError, match=f"elements of type {element}") as caught:
        dtype_from_mlir(element)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize("number", [0, 8, 10, 16, 99, -1])
def test_an_unknown_number(number: int) -> None:
    """8 and 10 are records and a buffer of them: no tensors."""
    with pytest.raises(ConversionError, match=f"OneFlow's data type {number}"):
        dtype_from_number(number)
