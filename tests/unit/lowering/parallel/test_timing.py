"""Nodes are measured by the names that splits give them; nothing is said about how fast they are."""

from __future__ import annotations

from pathlib import Path

import onnx_ir
import pytest
import split_graphs
from graphs import draw, graph

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import find_times, keep_times, measure_nodes
from graphkiln_backend.repository.version import ModelVersion


def version_of(folder: Path, model: onnx_ir.Model, golden: GoldenSamples | None = None) -> ModelVersion:
    return ModelVersion(graph_path=split_graphs.save(model, folder), manifest=None, golden=golden)


def test_every_node_has_its_time_also_those_that_runtimes_fuse(tmp_path: Path) -> None:
    version = version_of(tmp_path, split_graphs.convolutions())
    times = measure_nodes(version, largest_batch=4)
    assert times.sizes == (1, 4)
    named = {node.name for node in count_costs(version.graph_path, 1).nodes}
    for size in times.sizes:
        assert times.at(size).keys() == named
        assert sum(times.at(size).values()) > 0
    assert times.runtime.startswith("onnxruntime 1.")
    path = keep_times(version, times)
    assert path.name == NODE_TIMES_FILE
    assert find_times(version) == times


def test_nodes_inside_of_nodes_count_for_those_around_them(tmp_path: Path) -> None:
    """Both graphs hold nodes of the same names."""
    model = graph(
        """(float[b,4] x, bool c) => (float[b,4] y) {
            h = Neg(x)
            y = If (c) <then_branch = t () => (float[b,4] u) { u = Add(h, w) },
                        else_branch = e () => (float[b,4] v) { v = Abs(h) }>
        }""",
        w=draw(4),
    )
    times = measure_nodes(version_of(tmp_path, model), largest_batch=1)
    assert len(times.at(1)) == 2


def test_what_is_computed_once_has_no_time(tmp_path: Path) -> None:
    """Weights that are dequantized: the runtime does that while it loads the graph, or in the product itself."""
    version = version_of(tmp_path, split_graphs.quantized())
    costs = count_costs(version.graph_path, 1)
    named = {node.name for node in costs.nodes if not costs.local.intersection(node.writes)}
    assert len(named) == len(costs.nodes) - 3
    assert measure_nodes(version, largest_batch=1).at(1).keys() == named


def test_a_graph_that_computes_nothing_that_is_made_up(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[3,m] y) { y = Reshape(x, s) }", s=[3, -1])
    with pytest.raises(LoweringError, match="refuses every synthetic request"):
        measure_nodes(version_of(tmp_path, model), largest_batch=1)


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    version = version_of(tmp_path, split_graphs.mlp())
    (tmp_path / NODE_TIMES_FILE).mkdir()
    times = NodeTimes(graph="", runtime="", machine="", batches={"1": {"a": 1.0}})
    with pytest.raises(LoweringError, match="cannot write"):
        keep_times(version, times)
