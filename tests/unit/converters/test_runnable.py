"""Graphs of types without kernels, export notes, and old operator sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import zoo
from graphs import compute, draw, graph
from half_graphs import NUMPY, classifier
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.runnable import raise_opset, remove_export_notes, save_runnable


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("inside", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("border", [TensorProto.FLOAT, None])
def test_graphs_of_any_type_compute_the_same_as_the_reference_implementation(
    tmp_path: Path, inside: int, border: int | None, opset: int
) -> None:

    proto = classifier(inside, border or inside, opset=opset)
    x = draw(3, 3, 8, 8).astype(NUMPY[border or inside])
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    notes = save_runnable(onnx_ir.from_proto(proto), tmp_path / "m.onnx")
    assert bool(notes) == (inside != TensorProto.FLOAT16)
    with OnnxRuntimeEngine().build_reference(tmp_path / "m.onnx") as session:
        found = session.run({"x": x})["y"]
    assert found.dtype == expected.dtype
    error = {TensorProto.FLOAT16: 5e-3, TensorProto.BFLOAT16: 4e-2, TensorProto.DOUBLE: 1e-6}[inside]
    assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() < error


def test_unknown_operators_are_left_to_the_session(tmp_path: Path) -> None:
    model = graph("(float16[n,4] x) => (float16[n,4] y) { y = Relu(x) }")
    model.graph[0].op_type = "Warp"
    assert save_runnable(model, tmp_path / "m.onnx") == ()


# Notes of exporters.

PATH = "/home/ada/secret/net.py"


def noted(part: Any) -> Any:
    """Add the notes of exporters to a part of a protobuf graph."""
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


def test_export_notes_are_removed_and_outputs_stay_the_same() -> None:
    model = onnx_ir.from_proto(from_an_exporter())
    feeds = {"x": draw(3), "when": np.array(True)}
    before = compute(model, **feeds)
    remove_export_notes(model)
    text = onnx_ir.to_proto(model).SerializeToString()
    assert b"ada" not in text
    assert b"stack_trace" not in text
    np.testing.assert_array_equal(compute(model, **feeds)["out"], before["out"])


def test_metadata_of_the_model_stays() -> None:
    model = onnx_ir.from_proto(from_an_exporter())
    remove_export_notes(model)
    assert model.metadata_props == {"author": "Ada"}


# Old operator sets.


def bare(model: onnx.ModelProto, x: AnyArray) -> AnyArray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("opset", "operator"), [(7, "Upsample"), (9, "Upsample"), (10, "Resize")])
@pytest.mark.parametrize("scale", [1.5, 0.4])
def test_resizes_of_old_opsets_compute_the_same(opset: int, operator: str, mode: str, scale: float) -> None:
    if operator == "Upsample" and scale < 1:
        return  # it only grows
    scales = [1.0, 1.0, scale, scale]
    constants = {} if opset == 7 else {"scales": np.array(scales, np.float32)}
    resize = helper.make_node(operator, ["x", *constants], ["r"], mode=mode)
    if not constants:
        resize.attribute.append(helper.make_attribute("scales", scales))
    nodes = [resize, helper.make_node("Relu", ["r"], ["y"])]
    shapes = [zoo.value("x", ("n", 2, 5, 5)), zoo.value("y", ("n", 2, "h", "w"))]
    proto = zoo.model(nodes, shapes[:1], shapes[1:], constants, opset=opset, ir=4)
    model = onnx_ir.from_proto(proto)
    raise_opset(model)
    assert model.opset_imports[""] == OPSET
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 5)).astype(np.float32)
    np.testing.assert_allclose(bare(onnx_ir.to_proto(model), x), bare(proto, x), rtol=1e-6, atol=1e-6)


def test_scans_with_a_batch_are_not_converted() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Identity", ["c"], ["d"])],
        "step",
        [zoo.value("a", (2,)), zoo.value("b", (2,))],
        [zoo.value("c", (2,)), zoo.value("d", (2,))],
    )
    scan = helper.make_node("Scan", ["", "s", "x"], ["y", "z"], num_scan_inputs=1, body=body)
    shapes = {"s": (1, 2), "x": (1, 3, 2), "y": (1, 2), "z": (1, 3, 2)}
    values = [zoo.value(name, shape) for name, shape in shapes.items()]
    model = zoo.model([scan], values[:2], values[2:])
    model.opset_import[0].version = 8
    raised = onnx_ir.from_proto(model)
    raise_opset(raised)
    assert raised.opset_imports[""] == 8
    assert list(raised.graph.inputs[1].shape or ()) == [1, 3, 2]
