"""Rows that reach the leaves of trees in ONNX graphs, as other libraries export them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from recipes import recipe

from graphkiln_converters.sources.onnx_file import open_source
from graphkiln_converters.sources.trees import Trees, rounded_thresholds

# Thresholds of a complete tree of three levels: columns 0 and 1 in turn.
THRESHOLDS = (1e7, 2e-6, 4e-6, 0.9e7, 0.8e7, 1.1e7, 1.2e7)


def model(mode: str, scaled: bool) -> onnx.ModelProto:
    """A complete tree with a leaf value of its own for each of eight leaves."""
    inner = len(THRESHOLDS)
    numbers = [*range(2 * inner + 1)]
    attributes: dict[str, Any] = {
        "nodes_treeids": [0] * len(numbers),
        "nodes_nodeids": numbers,
        "nodes_featureids": [0, 1, 1, 0, 0, 0, 0] + [0] * (inner + 1),
        "nodes_values": [*THRESHOLDS, *[0.0] * (inner + 1)],
        "nodes_modes": [mode] * inner + ["LEAF"] * (inner + 1),
        "nodes_truenodeids": [2 * i + 1 if i < inner else 0 for i in numbers],
        "nodes_falsenodeids": [2 * i + 2 if i < inner else 0 for i in numbers],
        "target_treeids": [0] * (inner + 1),
        "target_nodeids": numbers[inner:],
        "target_ids": [0] * (inner + 1),
        "target_weights": [float(i) for i in range(inner + 1)],
        "n_targets": 1,
    }
    if mode.startswith("BRANCH_G"):  # the comparison holds on the upper side
        attributes["nodes_truenodeids"], attributes["nodes_falsenodeids"] = (
            *(attributes["nodes_falsenodeids"], attributes["nodes_truenodeids"]),
        )
    offset, scale = ([5e6, 3e-6], [1e-6, 1e6]) if scaled else ([0.0, 0.0], [1.0, 1.0])
    attributes["nodes_values"] = [
        (value - offset[column]) * scale[column]
        for value, column in zip(attributes["nodes_values"], attributes["nodes_featureids"], strict=True)
    ]
    nodes = [helper.make_node("TreeEnsembleRegressor", ["S"], ["y"], domain="ai.onnx.ml", **attributes)]
    nodes.insert(0, helper.make_node("Scaler", ["X"], ["S"], domain="ai.onnx.ml", offset=offset, scale=scale))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT"])
@pytest.mark.parametrize("scaled", [False, True])
def test_samples_reach_every_leaf_at_any_scale(tmp_path: Path, mode: str, scaled: bool) -> None:
    onnx.save(model(mode, scaled), tmp_path / "m.onnx")
    with open_source(str(tmp_path / "m.onnx"), recipe()) as source:
        (spec,) = source.inputs
        assert spec.known is not None
        found = source.run({"X": spec.known.astype(np.float32)})["y"]
    assert set(np.unique(found).tolist()) == set(range(8))
    assert bool(source.notes) == (mode == "BRANCH_LEQ")


def test_rounded_thresholds_are_told_where_nothing_else_shows_them(tmp_path: Path) -> None:
    """As onnxmltools writes LightGBM's, which answers otherwise for half of the rows in findings/."""
    made = model("BRANCH_LEQ", False)
    onnx.save(made, tmp_path / "m.onnx")
    with open_source(str(tmp_path / "m.onnx"), recipe()) as source:
        assert ["--reference" in note for note in source.notes] == [True]
    compared = recipe().model_copy(update={"reference": tmp_path / "library.npz"})
    with open_source(str(tmp_path / "m.onnx"), compared) as source:
        assert not source.notes
    (node,) = (node for node in made.graph.node if node.op_type == "TreeEnsembleRegressor")
    (values,) = (given for given in node.attribute if given.name == "nodes_values")
    exact = onnx.numpy_helper.from_array(np.array(values.floats, np.float64))
    values.CopyFrom(helper.make_attribute("nodes_values_as_tensor", exact))
    assert not rounded_thresholds(made.graph)


def test_a_graph_without_trees_has_none() -> None:
    assert Trees.of(onnx.GraphProto()) is None
