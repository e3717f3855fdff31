"""Tensors of a graph, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.external_data import check_external_data, external_locations, tensors


def graph(location: str = "w.bin") -> onnx.GraphProto:
    """An Add of weights outside, and a branch with a tensor of its own."""
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value=location)
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(1, np.float32), "inner"))
    inner = helper.make_graph([constant], "inner", [], [])
    branch = helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=inner)
    return helper.make_graph([branch], "g", [], [], [outside])


def test_tensors_of_branches_count() -> None:
    assert sorted({tensor.name for tensor in tensors(graph()) if tensor.name}) == ["inner", "w"]


def test_the_files_that_hold_weights() -> None:
    assert external_locations(graph()) == {"w.bin"}


def test_weights_beside_the_graph(tmp_path: Path) -> None:
    (tmp_path / "w.bin").touch()
    check_external_data(graph(), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("location", "words"), [("w.bin", "which is missing"), ("../w.bin", "leads out"), ("/w.bin", "leads out")]
)
def test_weights_elsewhere(location: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=words):
        check_external_data(graph(location), tmp_path / "m.onnx")
