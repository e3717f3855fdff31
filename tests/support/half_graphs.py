"""Small image classifiers of any floating-point type, made without an exporter."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NUMPY = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.DOUBLE: np.float64,
}


def classifier(inside: int, border: int, *, depth: int = 3, opset: int = 18) -> onnx.ModelProto:
    """Convolutions with batch norms and additions, then a softmax.

    Args:
        inside: Element type of weights and products.
        border: Element type of the input `x [N, 3, 8, 8]` and the output `y [N, 10]`; casts stand between.
        depth: Convolutions.
        opset: ONNX's.
    """
    draw = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []

    def weight(name: str, *shape: int) -> str:
        scaled = draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        weights.append(numpy_helper.from_array(np.abs(scaled + 1.5 * (len(shape) == 1)).astype(NUMPY[inside]), name))
        return name

    nodes = [helper.make_node("Cast", ["x"], ["inner"], to=inside)]
    nodes += [helper.make_node("Conv", ["inner", weight("stem", 8, 3, 3, 3)], ["h0"], pads=[1] * 4)]
    for i in range(1, depth):
        norm = [weight(f"{kind}{i}", 8) for kind in ("scale", "shift", "mean", "variance")]
        nodes += [
            helper.make_node("Conv", [f"h{i - 1}", weight(f"w{i}", 8, 8, 3, 3)], [f"c{i}"], pads=[1] * 4),
            helper.make_node("BatchNormalization", [f"c{i}", *norm], [f"n{i}"]),
            helper.make_node("Relu", [f"n{i}"], [f"r{i}"]),
            helper.make_node("Add", [f"r{i}", f"h{i - 1}"], [f"h{i}"]),
        ]
    nodes += [
        helper.make_node("GlobalAveragePool", [f"h{depth - 1}"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", weight("head", 10, 8), weight("bias", 10)], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["s"], axis=1),
        helper.make_node("Cast", ["s"], ["y"], to=border),
    ]
    x = helper.make_tensor_value_info("x", border, ["N", 3, 8, 8])
    y = helper.make_tensor_value_info("y", border, ["N", 10])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def write_classifier(path: Path, inside: int, border: int, *, depth: int = 3, opset: int = 18) -> Path:
    """Write such a classifier."""
    onnx.save(classifier(inside, border, depth=depth, opset=opset), path)
    return path
