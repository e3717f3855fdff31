"""Products that share a bias are quantized, whatever values are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import zoo
from onnx import helper

from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize, separate_biases

WEIGHTS = {f"w{seed}": np.random.default_rng(seed).normal(size=(4, 4, 1, 1)).astype(np.float32) for seed in (0, 1)}


def sharing(between: str) -> onnx.ModelProto:
    """Two convolutions with the bias `val_6`, and a value between them."""
    nodes = [
        helper.make_node("Conv", ["x", "w0", "val_6"], [between]),
        helper.make_node("Conv", [between, "w1", "val_6"], ["y"]),
    ]
    shape = ["b", 4, 2, 2]
    constants = {"val_6": np.ones(4, np.float32), **WEIGHTS}
    return zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)], constants)


def test_each_product_has_its_own() -> None:
    graph = sharing("middle").graph
    separate_biases(graph)
    biases = [node.input[2] for node in graph.node]
    assert biases == ["val_6", "val_6 of y"]
    values = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in graph.initializer}
    assert [values[name] for name in biases] == [[1.0] * 4] * 2


def test_a_value_that_is_called_like_a_copy_is_left_alone(tmp_path: Path) -> None:
    """The quantizer's own first copy of `val_6` is called `val_61`: an SSDlite was not valid any more."""
    (tmp_path / "fp32.onnx").write_bytes(sharing("val_61").SerializeToString())
    samples = {"x": np.random.default_rng(2).normal(size=(16, 4, 2, 2)).astype(np.float32)}
    coverage = quantize(tmp_path / "fp32.onnx", samples, Quantization(), tmp_path / "int8.onnx")
    assert (coverage.integer, coverage.products) == (2, 2)
