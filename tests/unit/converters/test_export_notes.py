"""What exporters write beside a graph is gone, wherever it stands; what the graph computes is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
from graphs import compute, draw, graph
from onnx import TensorProto, helper

from graphkiln_converters.export_notes import remove_export_notes

PATH = "/home/ada/secret/net.py"


def noted(part: Any) -> Any:
    """A part of a protobuf graph with all that exporters write beside it."""
    part.doc_string = f"{PATH}(59): forward"
    part.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{PATH}", line 59')
    return part


def branch(name: str) -> onnx.GraphProto:
    """`name = x + c`, as one side of an If."""
    constant = noted(helper.make_node("Constant", [], ["c"], value=noted(helper.make_tensor("c", 1, [1], [2.0]))))
    constant.attribute[0].doc_string = PATH
    add = noted(helper.make_node("Add", ["x", "c"], [name]))
    out = noted(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return noted(helper.make_graph([constant, add], f"g_{name}", [], [out]))


def from_an_exporter() -> onnx.ModelProto:
    """A graph with a branch, a function, and notes everywhere."""
    nodes = [
        noted(helper.make_node("If", ["when"], ["y"], then_branch=branch("a"), else_branch=branch("b"))),
        noted(helper.make_node("Twice", ["y"], ["z"], domain="own")),
        noted(helper.make_node("Mul", ["z", "w"], ["out"])),
    ]
    own = helper.make_function(
        "own", "Twice", ["i"], ["o"], [noted(helper.make_node("Add", ["i", "i"], ["o"]))], [helper.make_opsetid("", 18)]
    )
    body = helper.make_graph(
        nodes,
        "g",
        [
            noted(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])),
            helper.make_tensor_value_info("when", TensorProto.BOOL, []),
        ],
        [noted(helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n"]))],
        [noted(helper.make_tensor("w", 1, [1], [3.0]))],
        value_info=[noted(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"]))],
    )
    model = helper.make_model(
        noted(body), functions=[noted(own)], opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    )
    model.ir_version = 10
    model.metadata_props.add(key="author", value="Ada")
    return model


def test_no_path_is_left_and_the_outputs_are_the_same() -> None:
    model = onnx_ir.from_proto(from_an_exporter())
    feeds = {"x": draw(3), "when": np.array(True)}
    before = compute(model, **feeds)
    remove_export_notes(model)
    text = onnx_ir.to_proto(model).SerializeToString()
    assert b"ada" not in text
    assert b"stack_trace" not in text
    np.testing.assert_array_equal(compute(model, **feeds)["out"], before["out"])


def test_what_is_said_of_the_whole_model_stays() -> None:
    model = onnx_ir.from_proto(from_an_exporter())
    remove_export_notes(model)
    assert model.metadata_props == {"author": "Ada"}


def test_a_clean_graph_is_left_as_it_is() -> None:
    model = graph("(float[n,4] x) => (float[n,4] y) { y = Relu(x) }")
    before = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    remove_export_notes(model)
    assert onnx_ir.to_proto(model).SerializeToString(deterministic=True) == before
