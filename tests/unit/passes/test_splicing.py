"""Nodes before the inputs and behind the outputs of a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.passes.splicing import append, insert_behind, prepend

TEXT = "(float[b,3] x) => (float[b,3] y, float[b,3] z) { y = Relu(x) z = Add(x, y) }"


def test_a_node_before_an_input_is_read_by_all_who_read_it() -> None:
    model, x = graph(TEXT), draw(2, 3)
    value = model.graph.inputs[0]
    node = prepend(model, value, "Neg", {}, shape=value.shape)
    found = compute(model, x=x)
    np.testing.assert_array_equal(found["y"], np.maximum(-x, 0))
    np.testing.assert_array_equal(found["z"], -x + np.maximum(-x, 0))
    assert node.inputs[0] is model.graph.inputs[0]
    assert operators(model)[0] == "Neg"


def test_an_input_can_change_its_type() -> None:
    model = graph(TEXT)
    value = model.graph.inputs[0]
    prepend(model, value, "Cast", {"to": onnx_ir.DataType.FLOAT}, shape=value.shape, dtype=onnx_ir.DataType.INT32)
    assert model.graph.inputs[0].dtype == onnx_ir.DataType.INT32
    found = compute(model, x=np.array([[1, -2, 3]], np.int32))
    np.testing.assert_array_equal(found["y"], [[1, 0, 3]])


def test_two_of_them_one_before_the_other() -> None:
    model, x = graph(TEXT), draw(2, 3)
    for op_type in ("Exp", "Neg"):
        value = model.graph.inputs[0]
        prepend(model, value, op_type, {}, shape=value.shape)
    np.testing.assert_allclose(compute(model, x=x)["y"], np.exp(-x), rtol=1e-5)


def test_a_node_behind_an_output_takes_its_name_and_place() -> None:
    model, x = graph(TEXT), draw(2, 3)
    value = model.graph.outputs[0]
    append(model, value, "Neg", {}, shape=value.shape)
    found = compute(model, x=x)
    assert list(found) == ["y", "z"]
    np.testing.assert_array_equal(found["y"], -np.maximum(x, 0))
    np.testing.assert_array_equal(found["z"], x + np.maximum(x, 0), "others read the value as it was")


def test_with_constants_and_several_results() -> None:
    model, x = graph(TEXT), draw(2, 3)
    sizes = onnx_ir.Value(name="sizes", const_value=onnx_ir.tensor(np.array([1, 2], np.int64)))
    model.graph.register_initializer(sizes)
    value = model.graph.outputs[0]
    shape = onnx_ir.Shape(["b", 1])
    node = append(model, value, "Split", {"axis": 1}, shape=shape, constants=[sizes], outputs=2)
    assert len(node.outputs) == 2
    np.testing.assert_array_equal(compute(model, x=x)["y"], np.maximum(x, 0)[:, :1])


@pytest.mark.parametrize("at", [0, 1])
def test_the_order_of_outputs_stays(at: int) -> None:
    model = graph(TEXT)
    append(model, model.graph.outputs[at], "Exp", {}, shape=None)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


def test_a_node_behind_a_value_inside_is_read_by_all_who_read_the_value() -> None:
    model, x = graph(TEXT), draw(2, 3)
    value = model.graph.outputs[0]
    result = insert_behind(model, value, onnx_ir.node("Neg", [value]), "_before")
    found = compute(model, x=x)
    assert list(found) == ["y", "z"], "an output of the graph keeps its name and place"
    np.testing.assert_array_equal(found["y"], -np.maximum(x, 0))
    np.testing.assert_array_equal(found["z"], x - np.maximum(x, 0), "who read the value reads the node's result")
    assert (value.name, result.name, result.dtype, result.shape) == ("y_before", "y", value.dtype, value.shape)
