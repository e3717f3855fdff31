"""Graphs are loaded with the options that their configuration asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper
from onnx.backend.test.loader import DATA_DIR

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, loading
from graphkiln_backend.engines.onnxruntime.loading import save_optimized, session_options
from graphkiln_backend.graph.device import CPU

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def test_an_optimized_graph_of_ir_version_3_keeps_its_inputs(tmp_path: Path) -> None:
    """ONNX Runtime saves what it folds as inputs there: every request would lack them."""
    light = Path(DATA_DIR, "light", "light_squeezenet.onnx")
    save_optimized(light, session_options(CONFIG), tmp_path / "optimized.onnx")
    with (
        OnnxRuntimeEngine().build(tmp_path / "optimized.onnx", CONFIG) as optimized,
        OnnxRuntimeEngine().build(light, CONFIG) as saved,
    ):
        assert optimized.signature == saved.signature


def test_products_of_4_bit_weights_compute_in_fp32(tmp_path: Path) -> None:
    """ONNX Runtime rounds the activations of such a product to int8 by default: an error of 1% here."""
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    model = zoo.model(
        nodes, [zoo.value("x", ["b", 3])], [zoo.value("y", ["b", 2])], {"scale": np.float32(0.5)}, opset=21, ir=10
    )
    weights = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    model.graph.initializer.append(helper.make_tensor("q", TensorProto.UINT4, [3, 2], weights.astype(int).ravel()))
    (tmp_path / "4bit.onnx").write_bytes(model.SerializeToString())
    x = np.float32([[100, 0.3, -0.4], [-90, 0.2, 0.7]])
    with OnnxRuntimeEngine().build(tmp_path / "4bit.onnx", CONFIG) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ (weights / 2), rtol=1e-6)


@pytest.mark.parametrize(("saturates", "kind"), [(False, TensorProto.INT8), (True, TensorProto.UINT8)])
def test_int8_weights_stay_what_their_instructions_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saturates: bool, kind: int
) -> None:
    """VNNI multiplies uint8 by int8: with weights in uint8 ResNet-50 took three times as long."""
    monkeypatch.setattr(loading, "saturates_products_of_bytes", lambda: saturates)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "middle"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "middle"], ["xf"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["w"]),
        helper.make_node("Conv", ["xf", "w"], ["yf"]),
        helper.make_node("QuantizeLinear", ["yf", "scale", "middle"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "scale", "middle"], ["y"]),
    ]
    constants = {"scale": np.float32(0.5), "middle": np.uint8(128), "zero": np.int8(0)}
    constants["q"] = np.linspace(-128, 127, 32).astype(np.int8).reshape(4, 8, 1, 1)
    model = zoo.model(nodes, [zoo.value("x", ["b", 8, 2, 2])], [zoo.value("y", ["b", 4, 2, 2])], constants)
    (tmp_path / "int8.onnx").write_bytes(model.SerializeToString())
    save_optimized(tmp_path / "int8.onnx", session_options(CONFIG), tmp_path / "optimized.onnx")
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    (product,) = (node for node in graph.node if node.op_type == "QLinearConv")
    assert [tensor.data_type for tensor in graph.initializer if tensor.name == product.input[3]] == [kind]
