"""Sparse constants become dense, wherever they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import zoo
from onnx import helper, numpy_helper

from graphkiln_backend.passes.graph_file import load, make_dense

INDICES = ([0, 5, 15], [[0, 0], [1, 1], [3, 3]])
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def sparse(indices: Any) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices, np.int64), "i"), [4, 4])


def product(*before: onnx.NodeProto) -> onnx.ModelProto:
    nodes = [*before, helper.make_node("MatMul", ["x", "w"], ["y"])]
    return zoo.model(nodes, [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))])


def with_initializer(indices: Any) -> onnx.ModelProto:
    model = product()
    model.graph.sparse_initializer.append(sparse(indices))
    return model


def with_constant(indices: Any) -> onnx.ModelProto:
    return product(helper.make_node("Constant", [], ["w"], sparse_value=sparse(indices)))


def compute(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


@pytest.mark.parametrize("indices", INDICES, ids=["by element", "by axis"])
@pytest.mark.parametrize("make", [with_initializer, with_constant])
def test_it_computes_the_same(make: Any, indices: Any, tmp_path: Path) -> None:
    onnx.save(make(indices), tmp_path / "model.onnx")
    np.testing.assert_array_equal(compute(onnx_ir.to_proto(load(tmp_path / "model.onnx"))), X @ np.diag([1, 2, 0, 3]))


def test_inside_of_a_branch() -> None:
    inner = with_constant(INDICES[0]).graph
    del inner.input[:]
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    model = zoo.model([branch], [zoo.value("c", (), 9), zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))])
    make_dense(model)
    assert "sparse_tensor" not in str(model)
