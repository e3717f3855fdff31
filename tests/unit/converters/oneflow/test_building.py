"""What a translator is given: attributes that are checked, and nodes whose types are inferred."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir
import pytest
from translating import op, operation

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow import building as translator
from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow.building import (
    BY_PROTO_NAME,
    TRANSLATORS,
    GraphBuilder,
    Op,
    align_to_axis,
    check_channels_first,
    dtype_from_mlir,
    dtype_from_number,
    translates,
)
from graphkiln_converters.oneflow.mlir import Job, Opaque, Operation, TensorType, parse

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


# The three names of an element type in OneFlow's files.

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


# Channels first, and what belongs to channels.

BIAS = TensorType((3,), "f32")


def test_channels_first_is_the_default() -> None:
    check_channels_first(op(IMAGES))
    check_channels_first(op(IMAGES, data_format="channels_first"))


@pytest.mark.parametrize("layout", ["channels_last", "NHWC", ""])
def test_any_other_layout_is_rejected_with_the_fix(layout: str) -> None:
    with pytest.raises(ConversionError, match="save the graph without ONEFLOW_ENABLE_NHWC"):
        check_channels_first(op(IMAGES, data_format=layout))


@pytest.mark.parametrize(("axis", "shape"), [(0, [2, 1, 1, 1]), (1, [3, 1, 1]), (2, [8, 1])])
def test_a_weight_is_reshaped_without_a_node(axis: int, shape: list[int]) -> None:
    one = op(IMAGES, BIAS)
    weight = one.graph.weight("bias", np.arange(IMAGES.shape[axis] or 0, dtype="f4"))
    aligned = align_to_axis(one, weight, axis)
    assert list(aligned.shape or ()) == shape
    assert one.graph.nodes == []
    assert align_to_axis(one, weight, axis) is aligned


def test_a_computed_bias_is_reshaped_by_a_node() -> None:
    one = op(IMAGES, BIAS)
    one.inputs[1].name = "computed"
    aligned = align_to_axis(one, one.inputs[1], 1)
    assert [node.op_type for node in one.graph.nodes] == ["Reshape"]
    assert list(aligned.shape or ()) == [3, 1, 1]


def test_along_the_last_axis_nothing_changes() -> None:
    one = op(IMAGES, BIAS)
    assert align_to_axis(one, one.inputs[1], 3) is one.inputs[1]


# How a function becomes a translator: it stays a function, and stands under each operation that it names.


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    kept = dict(TRANSLATORS)
    yield
    TRANSLATORS.clear()
    TRANSLATORS.update(kept)


def test_a_function_stands_under_every_operation_that_it_names() -> None:
    @translates("warp", "weave")
    def both(op: object) -> object:
        return op

    assert TRANSLATORS["warp"] is both
    assert TRANSLATORS["weave"] is both


def test_the_function_itself_stays_what_it_is() -> None:
    def plain(op: object) -> object:
        return op

    assert translates("warp")(plain) is plain  # type: ignore[type-var]
    assert plain(3) == 3


def test_no_operation_is_no_translator() -> None:
    before = dict(TRANSLATORS)
    translates()(lambda op: op.x)
    assert before == TRANSLATORS


def test_a_later_module_replaces_what_an_earlier_one_said() -> None:
    translates("warp")(first := lambda op: op.x)
    translates("warp")(second := lambda op: op.x)
    assert TRANSLATORS["warp"] is second is not first


def test_the_operators_of_the_package_register_themselves() -> None:
    names = registry.built_in_translators()
    assert set(names) <= set(TRANSLATORS)
    assert {"conv2d", "matmul", "softmax", "reshape"} <= set(names)
    assert all(callable(function) for function in TRANSLATORS.values())
    assert translator.TRANSLATORS is TRANSLATORS


# Values of a parsed graph: what is shown of them in errors, and that nobody can change them by the way.

TEXT = """module {
  oneflow.job @GraphToRun_0(%arg0: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %out = "oneflow.input"(%arg0) {op_name = "in", shape = [2, 3]} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    oneflow.return %out : tensor<2x3xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("shape", "element", "text"),
    [
        ((2, 3), "f32", "tensor<2x3xf32>"),
        ((), "si64", "tensor<si64>"),
        ((None, 224), "f16", "tensor<?x224xf16>"),
        ((None,), "i1", "tensor<?xi1>"),
        ((0, 4), "bf16", "tensor<0x4xbf16>"),
    ],
)
def test_a_type_is_shown_as_mlir_writes_it(shape: tuple[int | None, ...], element: str, text: str) -> None:
    assert str(TensorType(shape, element)) == text


def test_what_is_shown_can_be_read_again() -> None:
    """The text of a type stands in errors: whoever searches the file for it finds it."""
    job = parse(TEXT)
    (operation,) = job.operations
    for type_ in (*job.arguments.values(), *operation.operand_types, *operation.result_types):
        assert str(type_) in TEXT


def test_operations_keep_their_line_and_names() -> None:
    job = parse(TEXT)
    (operation,) = job.operations
    assert job.name == "GraphToRun_0"
    assert list(job.arguments) == list(operation.operands)
    assert list(job.returns) == list(operation.results)
    assert (operation.kind, operation.line) == ("input", 3)
    assert TEXT.splitlines()[operation.line - 1].lstrip().startswith("%out")


@pytest.mark.parametrize("kind", [Job, Operation, TensorType, Opaque])
def test_values_are_frozen(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    (first, *_) = dataclasses.fields(kind)
    value = object.__new__(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first.name, "another")


def test_equal_types_are_one_key() -> None:
    assert len({TensorType((1, 2), "f32"), TensorType((1, 2), "f32"), TensorType((2, 1), "f32")}) == 2
    assert Opaque("device") != Opaque("parallel")
