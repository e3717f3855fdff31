"""Graphs of int8 whose weights and zero points are shared load on every CPU, and compute what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import compute, draw, graph

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
_A_STEP_BETWEEN = 0.02 * 128 * 0.02 + 0.02
"""What rounding the other way between the two products may change, in steps of 0.02."""
_QUANTIZED = """(float[N, 16] x) => (float[N, 16] y) {{
    xq = QuantizeLinear(x, s, z)
    xd = DequantizeLinear(xq, s, z)
    w0d = DequantizeLinear(w, s, {zero})
    a = MatMul(xd, w0d)
    aq = QuantizeLinear(a, s, z)
    ad = DequantizeLinear(aq, s, z)
    {dequantize}
    b = MatMul(ad, {second})
    bq = QuantizeLinear(b, s, z)
    y = DequantizeLinear(bq, s, z)
}}"""
_GRAPHS = {
    "a zero point": _QUANTIZED.format(zero="w0", dequantize="w1d = DequantizeLinear(v, s, w0)", second="w1d"),
    "a weight": _QUANTIZED.format(zero="w0", dequantize="w1d = DequantizeLinear(w, s, w1)", second="w1d"),
    "both": _QUANTIZED.format(zero="w0", dequantize="w1d = DequantizeLinear(w, s, w0)", second="w1d"),
    "what is dequantized": _QUANTIZED.format(zero="w0", dequantize="", second="w0d"),
    "whole products": """(float[N, 16] x) => (float[N, 16] y) {
        xq = QuantizeLinear(x, s, z)
        a = QLinearMatMul(xq, s, z, w, s, w0, s, z)
        b = QLinearMatMul(a, s, z, w, s, w0, s, z)
        y = DequantizeLinear(b, s, z)
    }""",
}


@pytest.fixture(params=_GRAPHS)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A graph with two products that share bytes."""
    rng = np.random.default_rng(0)
    weights = {name: rng.integers(-127, 128, (16, 16), dtype=np.int8) for name in ("w", "v")}
    zeros = {"z": np.uint8(128), "w0": np.int8(0), "w1": np.int8(0)}
    model = graph(_GRAPHS[request.param], opset=19, s=np.float32(0.02), **weights, **zeros)
    onnx.save(onnx_ir.to_proto(model), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_it_loads_and_computes_what_the_reference_computes(shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = draw(4, 16)
    expected = compute(onnx_ir.load(shared), x=x)["y"]
    with OnnxRuntimeEngine().build(shared, CONFIG) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=_A_STEP_BETWEEN)
    assert not capfd.readouterr().err


def test_weights_beside_the_graph_are_found(shared: Path) -> None:
    """They are named by the graph, and read from its folder wherever the process was started."""
    model = onnx.load(shared)
    onnx.save(model, shared, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with OnnxRuntimeEngine().build(shared, CONFIG) as session:
        assert session.run({"x": draw(1, 16)})["y"].shape == (1, 16)
