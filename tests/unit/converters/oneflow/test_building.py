"""Checked attributes, constants and element types of an operation to translate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from translating import op

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.building import (
    BY_PROTO_NAME,
    dtype_from_mlir,
    dtype_from_number,
)
from graphkiln_converters.oneflow.mlir import TensorType

IMAGES = TensorType((2, 3, 8, 6), "f32")


class TestAttributes:
    def test_a_boolean_is_not_a_number(self) -> None:
        one = op(IMAGES, b=True)
        for read in (one.integer, one.number):
            with pytest.raises(ConversionError, match="attribute 'b' is True"):
                read("b")

    @pytest.mark.parametrize("accessor", ["integer", "number", "flag", "text", "integers"])
    def test_a_missing_attribute_names_operation_and_line(self, accessor: str) -> None:
        with pytest.raises(ConversionError, match="line 3: any 'an_op': attribute 'a' is missing"):
            getattr(op(IMAGES), accessor)("a")

    @pytest.mark.parametrize(
        ("accessor", "value", "expected"),
        [
            ("integer", "1", "int"),
            ("number", [1], "int or float"),
            ("flag", 1, "bool"),
            ("text", 3, "str"),
            ("integers", 3, "list"),
        ],
    )
    def test_an_attribute_of_another_type_is_refused(self, accessor: str, value: Any, expected: str) -> None:
        with pytest.raises(ConversionError, match=f"expected {expected}"):
            getattr(op(IMAGES, a=value), accessor)("a")

    @pytest.mark.parametrize("axis", [4, -5, 2**40])
    def test_an_axis_out_of_range_is_refused(self, axis: int) -> None:
        with pytest.raises(ConversionError, match=f"'axis' is {axis}, but the input has 4 dimensions"):
            op(IMAGES, axis=axis).axis()


class TestSegments:
    @pytest.mark.parametrize("sizes", [[1], [1, 2], [3, -1], []])
    def test_segment_sizes_must_sum_up_to_the_operands(self, sizes: list[int]) -> None:
        with pytest.raises(ConversionError, match="do not fit 2 operands"):
            op(IMAGES, IMAGES, operand_segment_sizes=sizes).operand_segments()


class TestConstants:
    def test_large_constants_of_an_operation_have_different_names(self) -> None:
        one = op(IMAGES)
        first, second = one.constant(np.zeros(9)), one.constant(np.ones(9))
        assert first is not second
        assert {first.name, second.name} == {"an_op/of", "an_op/of_"}
        assert second.const_value is not None
        assert second.const_value.numpy().sum() == 9


# Element types in OneFlow's files.


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "kFloat"), (3, "kDouble"), (4, "kInt8"), (6, "kInt64"), (9, "kFloat16"), (11, "kBFloat16"), (12, "kBool")],
)
def test_numbers_and_names_of_the_enumeration_agree(number: int, name: str) -> None:
    """Source: OneFlow's data_type.proto."""
    assert dtype_from_number(number) is BY_PROTO_NAME[name]


@pytest.mark.parametrize("element", ["index", "f8E4M3", "none", "", "F32", "i4"])
def test_an_unsupported_element_type_is_refused_with_the_supported_ones(element: str) -> None:
    with pytest.raises(ConversionError, match=f"element type {element}") as caught:
        dtype_from_mlir(element)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize("number", [0, 8, 10, 16, 99, -1])
def test_an_unsupported_type_number_is_refused(number: int) -> None:
    """8 and 10 are records and a buffer of records."""
    with pytest.raises(ConversionError, match=f"OneFlow's data type {number}"):
        dtype_from_number(number)
