"""Where graphs round to 16 bits, and how deep."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest
import zoo
from graphs import graph
from half_graphs import classifier
from onnx import TensorProto, helper

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.rounding import Rounding, compute_in_fp32, computed_precision, infer_types, rounding_depth

F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("inside", "border", "precision"),
    [
        (F32, F32, Precision.FP32),
        (F64, F32, Precision.FP32),
        (F16, F16, Precision.FP16),
        (F16, F32, Precision.FP16),
        (BF16, BF16, Precision.BF16),
        (BF16, F16, Precision.BF16),
        (F32, F16, Precision.FP32),
        (F32, BF16, Precision.FP32),
    ],
)
def test_what_is_computed_counts_and_not_what_comes_and_goes(inside: int, border: int, precision: Precision) -> None:
    model = onnx_ir.from_proto(classifier(inside, border))
    infer_types(model)
    assert computed_precision(model) is precision


def test_weights_that_are_only_kept_in_16_bits_change_nothing() -> None:
    model = graph("(float16[4,4] w, float[n,4] x) => (float[n,4] y) { v = Cast<to=1>(w) y = MatMul(x, v) }")
    assert computed_precision(model) is Precision.FP32
    assert rounding_depth(model) == 0


def test_the_depth_is_that_of_the_longest_row() -> None:
    text = """(float16[n,4] x) => (float16[n,4] y) {
        a = Sigmoid(x) b = Transpose<perm=[0,1]>(a) c = Tanh(b) d = Exp(x) y = Add(c, d)
    }"""
    assert rounding_depth(graph(text)) == 3


def test_casts_around_fp32_kernels_round_as_the_nodes_did() -> None:
    model = onnx_ir.from_proto(classifier(BF16, BF16))
    infer_types(model)
    depth = rounding_depth(model)
    compute_in_fp32(model, onnx_ir.DataType.BFLOAT16)
    assert depth <= rounding_depth(model) <= depth + 2  # a Relu rounded nothing; the cast behind it does not know
    assert computed_precision(model) is Precision.BF16


def test_guessed_types_do_not_stay_in_the_graph() -> None:
    """ONNX knows nothing of ONNX Runtime's own operators; what a quantized one returns is no float."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("QLinearSigmoid", ["q", "scale", "zero", "scale", "zero"], ["s"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["s", "scale", "zero"], ["y"]),
    ]
    shape = ("n", 4)
    constants = {"scale": np.float32(0.1), "zero": np.uint8(3)}
    proto = zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)], constants)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model = onnx_ir.from_proto(proto)
    assert Rounding.of(model).precision is Precision.FP32
    assert {value.name: value.dtype for node in model.graph for value in node.outputs}["s"] is None
