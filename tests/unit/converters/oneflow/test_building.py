"""What a translator is given: attributes that are checked, and nodes whose types are inferred."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import pytest
from translating import op, operation

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.building import GraphBuilder, Op
from graphkiln_converters.oneflow.job import TensorType

IMAGES = TensorType((2, 3, 8, 6), "f32")


class TestTypes:
    def test_are_those_of_the_first_input_and_result(self) -> None:
        one = op(IMAGES, TensorType((4,), "si64"), results=[TensorType((5, 7), "si32")])
        assert (one.shape, one.rank, one.dtype) == ((2, 3, 8, 6), 4, DType.FP32)
        assert one.shape_of(1) == (4,)
        assert (one.result_shape, one.result_dtype) == ((5, 7), DType.INT32)

    def test_a_dynamic_size_is_an_error(self) -> None:
        with pytest.raises(ConversionError, match=r"tensor<2x\?xf32> has a dynamic size"):
            _ = op(TensorType((2, None), "f32")).shape

    def test_without_a_name_the_result_is_the_name(self) -> None:
        nameless = operation("relu", [IMAGES], [IMAGES], op_name="")
        assert Op(operation=nameless, inputs=[], graph=GraphBuilder()).name == "%0"


class TestAttributes:
    def test_are_read_by_their_type(self) -> None:
        one = op(IMAGES, i=3, f=0.5, b=True, s="text", l=[1, -2], e=[])
        assert (one.integer("i"), one.number("f"), one.flag("b"), one.text("s")) == (3, 0.5, True, "text")
        assert one.integers("l") == [1, -2]
        assert one.integers("e") == []

    def test_an_integer_is_a_number_and_a_float_no_integer(self) -> None:
        one = op(IMAGES, i=3, f=3.0)
        assert one.number("i") == 3.0
        assert type(one.number("i")) is float
        with pytest.raises(ConversionError, match=r"attribute 'f' is 3\.0, expected int"):
            one.integer("f")

    def test_a_boolean_is_neither(self) -> None:
        """Python's bool is an int; MLIR's `true` is not."""
        one = op(IMAGES, b=True)
        for read in (one.integer, one.number):
            with pytest.raises(ConversionError, match="attribute 'b' is True"):
                read("b")

    @pytest.mark.parametrize("accessor", ["integer", "number", "flag", "text", "integers"])
    def test_a_missing_one_names_operation_and_line(self, accessor: str) -> None:
        with pytest.raises(ConversionError, match="line 3: any 'an_op': attribute 'a' is missing"):
            getattr(op(IMAGES), accessor)("a")

    def test_defaults(self) -> None:
        one = op(IMAGES)
        assert (one.integer("a", 7), one.number("a", 0.25), one.flag("a", False), one.text("a", "t")) == (
            *(7, 0.25, False),
            "t",
        )
        assert one.integers("a", (1, 2)) == [1, 2]

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
    def test_of_another_type(self, accessor: str, value: Any, expected: str) -> None:
        with pytest.raises(ConversionError, match=f"expected {expected}"):
            getattr(op(IMAGES, a=value), accessor)("a")

    def test_a_list_of_other_things(self) -> None:
        with pytest.raises(ConversionError, match="'a' is not a list of integers"):
            op(IMAGES, a=[1, "2"]).integers("a")

    @pytest.mark.parametrize(("axis", "from_front"), [(0, 0), (3, 3), (-1, 3), (-4, 0)])
    def test_an_axis_counts_from_the_front(self, axis: int, from_front: int) -> None:
        assert op(IMAGES, axis=axis).axis() == from_front
        assert op(IMAGES, dim=axis).axis("dim") == from_front

    @pytest.mark.parametrize("axis", [4, -5, 2**40])
    def test_an_axis_that_the_input_lacks(self, axis: int) -> None:
        with pytest.raises(ConversionError, match=f"'axis' is {axis}, but the input has 4 dimensions"):
            op(IMAGES, axis=axis).axis()

    @pytest.mark.parametrize(
        ("attributes", "number"),
        [
            ({"has_float_operand": True, "float_operand": 0.5, "int_operand": 0}, 0.5),
            ({"has_float_operand": False, "float_operand": 0.5, "int_operand": 4}, 4),
            ({"has_bool_operand": True, "bool_operand": True, "int_operand": 0}, 1),
            ({"int_operand": -3}, -3),
        ],
    )
    def test_the_scalar_of_an_operation(self, attributes: dict[str, Any], number: float) -> None:
        found = op(IMAGES, **attributes).scalar_operand()
        assert found == number
        assert type(found) is type(number)


class TestSegments:
    def test_one_input_each_by_default(self) -> None:
        one = op(IMAGES, IMAGES)
        assert one.operand_segments() == [[one.inputs[0]], [one.inputs[1]]]

    def test_optional_operands_are_empty(self) -> None:
        one = op(IMAGES, IMAGES, IMAGES, operand_segment_sizes=[1, 0, 2, 0])
        assert one.operand_segments() == [[one.inputs[0]], [], [one.inputs[1], one.inputs[2]], []]

    @pytest.mark.parametrize("sizes", [[1], [1, 2], [3, -1], []])
    def test_sizes_that_do_not_fit(self, sizes: list[int]) -> None:
        with pytest.raises(ConversionError, match="do not fit 2 operands"):
            op(IMAGES, IMAGES, operand_segment_sizes=sizes).operand_segments()


class TestNodes:
    def test_names_are_the_operations_and_no_two_are_the_same(self) -> None:
        one = op(IMAGES)
        first = one.emit("Relu", one.x)
        second = one.emit("Neg", first)
        values, indices = one.emit_multiple("TopK", 2, second, one.constant([2]), axis=-1)
        assert [node.name for node in one.graph.nodes] == ["an_op", "an_op/1", "an_op/2"]
        assert [value.name for value in (first, second, values, indices)] == [
            "an_op",
            "an_op/1",
            "an_op/2",
            "an_op/2:1",
        ]

    def test_types_and_shapes_are_inferred(self) -> None:
        one = op(IMAGES)
        values, indices = one.emit_multiple("TopK", 2, one.x, one.constant([2]), axis=-1)
        assert (values.dtype, indices.dtype) == (onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64)
        assert list(values.shape or ()) == [2, 3, 8, 2]

    def test_shapes_are_inferred_through_constants(self) -> None:
        one = op(IMAGES)
        assert list(one.emit("Reshape", one.x, one.constant([0, -1])).shape or ()) == [2, 144]

    @pytest.mark.parametrize(
        ("op_type", "attributes"),
        [
            ("Transpose", {"perm": [0, 1, 2, 9]}),
            ("Concat", {"axis": 7}),
            ("Softmax", {"axis": 2**70}),
            ("Conv", {}),
        ],
    )
    def test_what_no_node_can_have(self, op_type: str, attributes: dict[str, Any]) -> None:
        one = op(IMAGES)
        with pytest.raises(ConversionError, match=f"line 3: any 'an_op': .*do not fit each other: {op_type}"):
            one.emit(op_type, one.x, **attributes)

    def test_a_cast(self) -> None:
        one = op(IMAGES)
        assert one.cast(one.x, DType.BF16).dtype == onnx_ir.DataType.BFLOAT16


class TestConstants:
    def test_like_ones_are_shared(self) -> None:
        one = op(IMAGES)
        assert one.constant([1, 2]) is one.constant([1, 2])
        assert one.constant([1, 2]) is not one.constant([1, 2], DType.INT32)
        assert one.constant([1, 2]) is not one.constant([[1, 2]])
        assert one.constant(0.0, DType.FP32) is not one.constant(-0.0, DType.FP32)

    def test_large_ones_are_named_by_their_operation_and_never_mixed_up(self) -> None:
        one = op(IMAGES)
        first, second = one.constant(np.zeros(9)), one.constant(np.ones(9))
        assert first is not second
        assert {first.name, second.name} == {"an_op/of", "an_op/of_"}
        assert second.const_value is not None
        assert second.const_value.numpy().sum() == 9

    def test_are_int64_unless_a_type_is_given(self) -> None:
        assert op(IMAGES).constant(3).dtype == onnx_ir.DataType.INT64

    def test_a_scalar_is_of_the_inputs_type(self) -> None:
        scalar = op(TensorType((2,), "f16")).scalar(0.5)
        assert scalar.dtype == onnx_ir.DataType.FLOAT16
        assert list(scalar.shape or ()) == []

    def test_a_weight_is_added_once(self) -> None:
        graph = GraphBuilder()
        assert graph.weight("w", np.zeros(2)) is graph.weight("w", np.ones(2))
        assert list(graph.weights) == ["w"]
