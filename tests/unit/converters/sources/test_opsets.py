"""Graphs of old operator sets compute the same with new operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import zoo
from onnx import helper

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.sources.opsets import raise_opset


def bare(model: onnx.ModelProto, x: AnyArray) -> AnyArray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("opset", "operator"), [(7, "Upsample"), (9, "Upsample"), (10, "Resize")])
@pytest.mark.parametrize("scale", [2.0, 1.5, 0.4])
def test_pixels_stay_where_they_were(opset: int, operator: str, mode: str, scale: float) -> None:
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


def test_a_graph_of_the_newest_set_stays_as_it_is(tmp_path: Path) -> None:
    model = onnx_ir.from_proto(zoo.scale(("n", 3), opset=OPSET + 2))
    raise_opset(model)
    onnx_ir.save(model, tmp_path / "m.onnx")
    assert model.opset_imports[""] == OPSET + 2


def test_scans_with_a_batch_stay_what_they_are() -> None:
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
