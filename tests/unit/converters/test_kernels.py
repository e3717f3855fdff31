"""Graphs of types that ONNX Runtime lacks kernels for: run all the same, and said so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph, operators
from half_graphs import NUMPY, classifier
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_converters.kernels import save_runnable


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("inside", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("border", [TensorProto.FLOAT, None])
def test_any_type_runs_and_computes_what_onnx_says(tmp_path: Path, inside: int, border: int | None, opset: int) -> None:
    """Beside ONNX's own implementation, in numpy."""
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


def test_the_notes_name_types_and_operators(tmp_path: Path) -> None:
    (bf16,) = save_runnable(onnx_ir.from_proto(classifier(16, 16)), tmp_path / "m.onnx")
    assert "nodes in bf16 compute in fp32" in bf16
    (fp64,) = save_runnable(onnx_ir.from_proto(classifier(11, 11)), tmp_path / "m.onnx")
    assert fp64.startswith("Conv, GlobalAveragePool compute in fp32")


def test_a_graph_in_fp32_is_written_as_it_is(tmp_path: Path) -> None:
    assert save_runnable(graph("(float[n,4] x) => (float[n,4] y) { y = Relu(x) }"), tmp_path / "m.onnx") == ()
    assert operators(onnx_ir.load(tmp_path / "m.onnx")) == ["Relu"]


def test_what_cannot_be_helped_is_left_to_its_session(tmp_path: Path) -> None:
    model = graph("(float16[n,4] x) => (float16[n,4] y) { y = Relu(x) }")
    model.graph[0].op_type = "Warp"
    assert save_runnable(model, tmp_path / "m.onnx") == ()


def test_notes_of_an_exporter_are_not_written(tmp_path: Path) -> None:
    model = graph("(float[n,4] x) => (float[n,4] y) { y = Relu(x) }")
    model.graph[0].metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/ada/net.py", line 59'
    save_runnable(model, tmp_path / "m.onnx")
    assert b"ada" not in (tmp_path / "m.onnx").read_bytes()
