"""Integer products are exact on every CPU, and int8 weights that are shared load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import compute, draw, graph
from onnx import helper, numpy_helper

from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.exact_products import has_integer_products, make_exact
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
_RUNTIME = "com.microsoft"
_QUANTIZED = ["x", "one", "xz", "w", "one", "wz", "ys", "yz"]
_NODES = {
    "QLinearMatMul": (["QLinearMatMul", _QUANTIZED, ""], 8),
    "QLinearConv": (["QLinearConv", _QUANTIZED, ""], 8),
    "MatMulInteger": (["MatMulInteger", ["x", "w", "xz", "wz"], ""], 32),
    "MatMulInteger without zero points": (["MatMulInteger", ["x", "w"], ""], 32),
    "MatMulIntegerToFloat": (["MatMulIntegerToFloat", ["x", "w", "one", "one", "xz", "wz"], _RUNTIME], 1),
    "QGemm": (["QGemm", ["x", "one", "xz", "w", "one", "wz"], _RUNTIME], 1),
}
# the node, and the bits of its output: 1 for floats
_SESSIONS: dict[str, Callable[[Path], Session]] = {
    "reference": OnnxRuntimeEngine().build_reference,
    "as it is served": lambda path: OnnxRuntimeEngine().build(path, CONFIG),
    "basic": lambda path: OnnxRuntimeEngine().build(path, replace(CONFIG, tuning=SessionTuning(graph_level="basic"))),
}


class Product:
    """A graph of one product with its input and exact output (within one step if it rounds)."""

    def __init__(self, path: Path, feed: AnyArray, expected: AnyArray) -> None:
        self.path, self.feed, self.expected = path, feed, expected

    def check(self, build: Callable[[Path], Session]) -> None:
        with build(self.path) as session:
            found = session.run({"x": self.feed})["y"].reshape(self.expected.shape)
        np.testing.assert_allclose(found, self.expected, atol=1, rtol=0)


@pytest.fixture(params=["uint8", "int8"])
def activation(request: pytest.FixtureRequest) -> AnyArray:
    """`[4, 64]` near the upper end of its range, where sums saturate at 16 bits."""
    dtype = np.dtype(request.param)
    return np.random.default_rng(0).integers(np.iinfo(dtype).max - 60, np.iinfo(dtype).max, (4, 64)).astype(dtype)


@pytest.fixture
def weight() -> AnyArray:
    """INT8 `[64, 32]`, large."""
    return np.random.default_rng(1).integers(90, 128, (64, 32)).astype(np.int8)


@pytest.fixture(params=_NODES)
def product(request: pytest.FixtureRequest, activation: AnyArray, weight: AnyArray, tmp_path: Path) -> Product:
    (op_type, inputs, domain), bits = _NODES[request.param]
    exact = activation.astype(np.int64) @ weight.astype(np.int64)
    step = np.float32(exact.max() / np.iinfo(activation.dtype).max)
    x, w = (
        (activation, weight) if op_type != "QLinearConv" else (activation[:, :, None, None], weight.T[:, :, None, None])
    )
    zeros = {"one": np.float32(1), "xz": x.dtype.type(0), "wz": np.int8(0), "ys": step, "yz": x.dtype.type(0)}
    kind = {8: helper.np_dtype_to_tensor_dtype(x.dtype), 32: onnx.TensorProto.INT32, 1: onnx.TensorProto.FLOAT}[bits]
    graph = helper.make_graph(
        [helper.make_node(op_type, inputs, ["y"], domain=domain)],
        "product",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in {"w": w, **zeros}.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(_RUNTIME, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    expected = np.round(exact / step) if bits == 8 else exact
    return Product(tmp_path / "model.onnx", x, expected)


@pytest.mark.parametrize("build", _SESSIONS.values(), ids=_SESSIONS)
def test_products_are_exact(product: Product, build: Callable[[Path], Session]) -> None:
    product.check(build)


def test_external_weights_are_converted(product: Product) -> None:
    model = onnx.load(product.path)
    onnx.save(model, product.path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    product.check(_SESSIONS["reference"])


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"QLinearConv, or what a transfer left of it")
    with pytest.raises(LoweringError, match=r"cannot load .*model\.onnx"):
        make_exact(tmp_path / "model.onnx")


_INTEGER_GRAPH = """(float[N, 3] x) => (int32[N, 3] y) {
    q, scale, zero = DynamicQuantizeLinear(x)
    y = MatMulInteger(q, w, zero)
}"""
_FLOAT_GRAPH = "(float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(("text", "found"), [(_INTEGER_GRAPH, True), (_FLOAT_GRAPH, False)])
def test_integer_products_are_found(text: str, found: bool, tmp_path: Path) -> None:
    weight = draw(3, 3)
    model = onnx_ir.to_proto(graph(text, w=weight.astype("int8") if found else weight))
    onnx.save(model, tmp_path / "model.onnx")
    assert has_integer_products(tmp_path / "model.onnx") == found


_A_STEP_BETWEEN = 0.02 * 128 * 0.02 + 0.02  # rounding the other way between the two products, in steps of 0.02
_SHARING = """(float[N, 16] x) => (float[N, 16] y) {{
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
    "a zero point": _SHARING.format(zero="w0", dequantize="w1d = DequantizeLinear(v, s, w0)", second="w1d"),
    "a weight": _SHARING.format(zero="w0", dequantize="w1d = DequantizeLinear(w, s, w1)", second="w1d"),
    "both": _SHARING.format(zero="w0", dequantize="w1d = DequantizeLinear(w, s, w0)", second="w1d"),
    "what is dequantized": _SHARING.format(zero="w0", dequantize="", second="w0d"),
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


def test_shared_int8_weights_compute_as_the_reference(shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = draw(4, 16)
    expected = compute(onnx_ir.load(shared), x=x)["y"]
    with OnnxRuntimeEngine().build(shared, CONFIG) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=_A_STEP_BETWEEN)
    assert not capfd.readouterr().err


def test_shared_external_weights(shared: Path) -> None:
    """They are named by the graph, and read from its folder wherever the process was started."""
    model = onnx.load(shared)
    onnx.save(model, shared, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with OnnxRuntimeEngine().build(shared, CONFIG) as session:
        assert session.run({"x": draw(1, 16)})["y"].shape == (1, 16)
