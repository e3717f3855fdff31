"""Products of integers are those of 64-bit integers, on every CPU, in the reference as in what serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.exact_products import make_exact
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
"""The node, and the bits of what it gives: 1 for floats."""
_SESSIONS: dict[str, Callable[[Path], Session]] = {
    "reference": OnnxRuntimeEngine().build_reference,
    "as it is served": lambda path: OnnxRuntimeEngine().build(path, CONFIG),
    "basic": lambda path: OnnxRuntimeEngine().build(path, replace(CONFIG, tuning=SessionTuning(graph_level="basic"))),
}


class Product:
    """A graph of one product, what it is given, and what it must give, to one step where it rounds."""

    def __init__(self, path: Path, feed: AnyArray, expected: AnyArray) -> None:
        self.path, self.feed, self.expected = path, feed, expected

    def check(self, build: Callable[[Path], Session]) -> None:
        with build(self.path) as session:
            found = session.run({"x": self.feed})["y"].reshape(self.expected.shape)
        np.testing.assert_allclose(found, self.expected, atol=1, rtol=0)


@pytest.fixture(params=["uint8", "int8"])
def activation(request: pytest.FixtureRequest) -> AnyArray:
    """`[4, 64]` near the upper end of its range, where sums of 16 bits are cut off."""
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
def test_no_sum_is_cut_off(product: Product, build: Callable[[Path], Session]) -> None:
    product.check(build)


def test_weights_beside_the_graph_are_turned_too(product: Product) -> None:
    model = onnx.load(product.path)
    onnx.save(model, product.path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    product.check(_SESSIONS["reference"])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"QLinearConv, or what a transfer left of it")
    with pytest.raises(LoweringError, match=r"cannot load .*model\.onnx"):
        make_exact(tmp_path / "model.onnx")
