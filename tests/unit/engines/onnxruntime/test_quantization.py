"""Quantization of small graphs: products that become integer, their error, and biases."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from onnx import helper
from onnxruntime.quantization import qdq_quantizer

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.quantization import (
    Quantization,
    _silenced,
    quantize,
    separate_biases,
)
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

SAMPLES = {"x": np.random.default_rng(0).normal(size=(32, 3, 8, 8)).astype(np.float32)}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Two convolutions with biases, a mean and a product."""
    generator = np.random.default_rng(1)
    constants = {
        "w1": generator.normal(size=(8, 3, 3, 3)) / 5,
        "b1": generator.normal(size=8),
        "w2": generator.normal(size=(8, 8, 3, 3)) / 8,
        "b2": generator.normal(size=8),
        "w3": generator.normal(size=(8, 4)),
    }
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], name="relu1"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"], name="relu2"),
        node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
        node("Flatten", ["p"], ["f"], name="flatten"),
        node("MatMul", ["f", "w3"], ["y"], name="fc"),
    ]
    floats = {name: array.astype(np.float32) for name, array in constants.items()}
    model = zoo.model(nodes, [zoo.value("x", ("batch", 3, 8, 8))], [zoo.value("y", ("batch", 4))], floats)
    return zoo.add(tmp_path, "m", model) / "model.onnx"


def outputs_of(graph: Path) -> AnyArray:
    with OnnxRuntimeEngine().build_reference(graph) as session:
        return session.run({"x": SAMPLES["x"][:8]})["y"]


class TestQuantize:
    @pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
    def test_quantized_products_and_error(self, graph: Path, tmp_path: Path, method: Any) -> None:
        coverage = quantize(graph, SAMPLES, Quantization(method=method), tmp_path / "int8.onnx")
        assert str(coverage) == "3/3 products in int8"
        expected, found = outputs_of(graph), outputs_of(tmp_path / "int8.onnx")
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.1

    @pytest.mark.parametrize(("quantize_bias", "expected"), [(True, 2), (False, 0)])
    def test_quantized_biases(self, graph: Path, tmp_path: Path, quantize_bias: bool, expected: int) -> None:
        quantize(graph, SAMPLES, Quantization(quantize_bias=quantize_bias), tmp_path / "int8.onnx")
        tensors = onnx.load(tmp_path / "int8.onnx").graph.initializer
        biases = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.INT32 and tensor.dims == [8]]
        assert len([tensor for tensor in biases if "zero_point" not in tensor.name]) == expected

    def test_weights_are_quantized_per_channel(self, graph: Path, tmp_path: Path) -> None:
        quantize(graph, SAMPLES, Quantization(), tmp_path / "int8.onnx")
        scales = {tensor.name: tensor.dims for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer}
        assert scales["w1_scale"] == [8]

    def test_damaged_graph(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"nonsense")
        with pytest.raises(LoweringError) as caught:
            quantize(tmp_path / "model.onnx", SAMPLES, Quantization(), tmp_path / "int8.onnx")
        assert ": " in caught.value.attempts[0]


class TestSilence:
    def test_root_logger_is_not_changed(self, graph: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        root = logging.getLogger()
        before = root.level, root.handlers[:], root.filters[:]
        quantize(graph, SAMPLES, Quantization(), tmp_path / "int8.onnx")
        assert (root.level, root.handlers, root.filters) == before
        assert not caplog.records

    def test_output_of_the_quantizer_is_suppressed(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO), _silenced():
            qdq_quantizer.logging.info("a line for every tensor")
            qdq_quantizer.logging.warning("something to know")
            assert qdq_quantizer.logging.WARNING == logging.WARNING
            logging.getLogger("somebody.else").info("not the quantizer's")
        assert caplog.record_tuples == [
            ("onnxruntime.quantization", logging.WARNING, "something to know"),
            ("somebody.else", logging.INFO, "not the quantizer's"),
        ]


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


def test_shared_bias_is_copied() -> None:
    graph = sharing("middle").graph
    separate_biases(graph)
    biases = [node.input[2] for node in graph.node]
    assert biases == ["val_6", "val_6 of y"]
    values = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in graph.initializer}
    assert [values[name] for name in biases] == [[1.0] * 4] * 2


def test_value_named_like_a_copied_bias(tmp_path: Path) -> None:
    """The quantizer's own first copy of `val_6` is called `val_61`: an SSDlite was not valid any more."""
    (tmp_path / "fp32.onnx").write_bytes(sharing("val_61").SerializeToString())
    samples = {"x": np.random.default_rng(2).normal(size=(16, 4, 2, 2)).astype(np.float32)}
    coverage = quantize(tmp_path / "fp32.onnx", samples, Quantization(), tmp_path / "int8.onnx")
    assert (coverage.integer, coverage.products) == (2, 2)
