"""Repacked weights that are mapped: where they lie, and that kernels can read them there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.engines.onnxruntime.loading import WEIGHTS, align_prepacked, save_optimized

SIZES = [(100, 3), (3, 101), (101, 50)]
"""No product of these is a multiple of 16, a register of float32."""


def products(*, inside: bool = False) -> onnx.ModelProto:
    """A chain of matrix products, or the last of them in both branches of an If."""
    names = [f"w{index}" for index in range(len(SIZES))]
    weights = [
        numpy_helper.from_array(np.random.default_rng(index).standard_normal(size).astype(np.float32), names[index])
        for index, size in enumerate(SIZES)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in (("x", 100), ("y", 50))
    )
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("MatMul", ["a", "w1"], ["b"])]
    last = helper.make_node("MatMul", ["b", "w2"], ["y"])
    if inside:
        out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
        body = [
            helper.make_graph([helper.make_node("MatMul", ["b", "v"], ["z"])], "branch", [], out, [renamed])
            for renamed in (numpy_helper.from_array(numpy_helper.to_array(weights[2]), "v") for _ in range(2))
        ]
        nodes.append(helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0))
        nodes.append(helper.make_node("Cast", ["most"], ["go"], to=TensorProto.BOOL))
        last = helper.make_node("If", ["go"], ["y"], then_branch=body[0], else_branch=body[1])
        weights = weights[:2]
    graph = helper.make_graph([*nodes, last], "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def run(graph: Path, *, optimize: bool) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.random.default_rng(9).random((2, 100), np.float32)})[0])


def offsets(graph: Path) -> list[int]:
    text = onnx.printer.to_text(onnx.load(str(graph), load_external_data=False))
    return [int(part.partition(";")[0]) for part in _blobs(text)]


def _blobs(text: str) -> list[str]:
    values = [line for line in text.replace('"', "\n").splitlines() if "|" in line and ";" in line]
    return [blob for value in values for blob in value.split("|")[1:]]


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_mapped_is_aligned_and_computes_the_same(tmp_path: Path, *, inside: bool) -> None:
    source, copy = tmp_path / "model.onnx", tmp_path / "copy" / "graph.onnx"
    copy.parent.mkdir()
    onnx.save(products(inside=inside), source)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    save_optimized(source, options, copy)
    assert offsets(copy)
    assert [offset for offset in offsets(copy) if offset % 64] == []
    np.testing.assert_allclose(run(copy, optimize=False), run(source, optimize=True), rtol=1e-5)


def test_what_is_aligned_stays_as_it_is(tmp_path: Path) -> None:
    onnx.save(products(), tmp_path / "graph.onnx")
    before = (tmp_path / "graph.onnx").read_bytes()
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    assert (tmp_path / "graph.onnx").read_bytes() == before
    assert (tmp_path / WEIGHTS).read_bytes() == b"weights"


def test_only_what_is_not_aligned_is_moved(tmp_path: Path) -> None:
    model = products()
    tensor = model.graph.initializer[0]
    tensor.external_data.add(key="prepacked_0", value="MatMul+7|64;3;0|70;5;0")
    (tmp_path / "graph.onnx").write_bytes(model.SerializeToString())
    (tmp_path / WEIGHTS).write_bytes(bytes(70) + b"inner" + bytes(3))
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    changed = onnx.load(str(tmp_path / "graph.onnx"), load_external_data=False)
    assert changed.graph.initializer[0].external_data[0].value == "MatMul+7|64;3;0|128;5;0"
    assert (tmp_path / WEIGHTS).read_bytes()[128:] == b"inner"
