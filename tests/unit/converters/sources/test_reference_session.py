"""ONNX's own implementation as a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import graph
from onnx import TensorProto, helper

from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_converters.sources.onnx_file import ReferenceSession


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = graph("(double[n,2] x) => (double[n,2] y, double[n,2] z) { y = Erf(x) z = Add(x, x) }")
    onnx_ir.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_it_computes_in_the_graphs_own_type(path: Path) -> None:
    with ReferenceSession.open(path) as session:
        assert [spec.name for spec in session.signature.outputs] == ["y", "z"]
        x = np.array([[1.0, 1e-9]])
        found = session.run({"x": x}, ["z"])
        assert list(found) == ["z"]
        np.testing.assert_array_equal(found["z"], 2 * x)
        assert session.run({"x": x})["y"][0, 1] == pytest.approx(1e-9 * 2 / np.sqrt(np.pi), rel=1e-12)
        assert not session.placement({"x": x}).nodes


def test_feeds_that_do_not_fit(path: Path) -> None:
    with pytest.raises(ExecutionError, match="reference implementation failed"):
        ReferenceSession.open(path).run({})


def test_an_unknown_operator(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [1])
    out = helper.make_tensor_value_info("y", TensorProto.DOUBLE, [1])
    proto = helper.make_model(
        helper.make_graph([helper.make_node("Warp", ["x"], ["y"], domain="far.away")], "g", [value], [out]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("far.away", 1)],
    )
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(LoweringError, match="cannot be computed in its own type"):
        ReferenceSession.open(tmp_path / "m.onnx")
