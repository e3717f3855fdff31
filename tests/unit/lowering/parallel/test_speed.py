"""Counted and measured times of nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import split_graphs
from graphs import draw, graph

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, GraphCosts, NodeCost, NodeTimes
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import (
    MeasuredSpeed,
    Speed,
    find_times,
    keep_times,
    measure_nodes,
)
from graphkiln_backend.lowering.parallel.stages import find_stages
from graphkiln_backend.repository.version import ModelVersion

COSTS = GraphCosts(
    nodes=(
        NodeCost(name="product", op_type="MatMul", flops=4000, weights={"w": 100}, reads=("x",), writes={"h": 20}),
        NodeCost(name="relu", op_type="Relu", reads=("h",), writes={"y": 20}),
    ),
    inputs={"x": 40},
    outputs=frozenset(["y"]),
)


def test_counted_time_of_a_node() -> None:
    speed = Speed(flops_per_s=1000.0, bytes_per_s=10.0, link_bytes_per_s=5.0, link_s=0.5)
    assert list(speed.node_seconds(COSTS, 1)) == [16.0, 4.0]  # (100 + 40 + 20) / 10, (20 + 20) / 10
    assert list(speed.node_seconds(COSTS, 10)) == [70.0, 40.0]  # weights are read once; 700 bytes beside 40 s
    assert speed.link_seconds(10) == pytest.approx(2.5)


COUNTED = Speed(flops_per_s=1.0, bytes_per_s=1e12, link_bytes_per_s=1e12, link_s=0.0)  # a second for each operation


def chain(*flops: int) -> GraphCosts:
    nodes = tuple(
        NodeCost(name=f"n{number}", op_type="MatMul", flops=each, reads=(f"t{number}",), writes={f"t{number + 1}": 4})
        for number, each in enumerate(flops)
    )
    return GraphCosts(nodes=nodes, inputs={"t0": 4}, outputs=frozenset([f"t{len(flops)}"]))


def times(**batches: dict[str, float]) -> NodeTimes:
    sizes = {name.removeprefix("of_"): seconds for name, seconds in batches.items()}
    return NodeTimes(graph="", runtime="onnxruntime 1", machine="a core", batches=sizes)


def measured(costs: GraphCosts, found: NodeTimes) -> MeasuredSpeed:
    return MeasuredSpeed.of(COUNTED, found, costs)


def test_measured_times_replace_counted_costs() -> None:
    costs = chain(1, 1, 1, 1)
    speed = measured(costs, times(of_1={"n0": 9.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [9, 1, 1, 1])
    assert [stage.begin for stage in find_stages(costs, 2, speed)] == [0, 1]
    assert [stage.begin for stage in find_stages(costs, 2, COUNTED)] == [0, 2]
    assert speed.link_seconds(8) == COUNTED.link_seconds(8)


def test_unmeasured_node_has_its_share_of_counted_costs() -> None:
    costs = chain(2, 1, 5)
    speed = measured(costs, times(of_1={"n0": 8.0, "n1": 4.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [8, 4, 20])
    assert speed.explain() == (
        "costs: measured by onnxruntime 1 on a core for batches of 1 (node_times.json), 2 of 3 nodes; the other 1 by "
        "counted costs"
    )


def test_interpolation_between_batch_sizes() -> None:
    """Ratio of measured to counted time: 1 for one row, 3 for five rows, 2 halfway."""
    costs = chain(1)
    speed = measured(costs, times(of_1={"n0": 1.0}, of_5={"n0": 15.0}))
    assert [float(speed.node_seconds(costs, rows)[0]) for rows in (1, 3, 5, 10)] == pytest.approx([1, 6, 15, 30])
    assert "for batches of 1 and 5" in speed.explain()


def test_shard_takes_its_part_of_the_measured_time() -> None:
    costs = chain(8, 2)
    shard = replace(costs, nodes=(replace(costs.nodes[0], flops=4), costs.nodes[1]))
    speed = measured(costs, times(of_1={"n0": 80.0, "n1": 2.0}))
    np.testing.assert_allclose(speed.node_seconds(shard, 1), [40, 2])


def test_measured_time_of_a_node_without_counted_cost() -> None:
    costs = chain(4)
    costs = replace(costs, nodes=(*costs.nodes, NodeCost(name="shape", op_type="Shape")))
    speed = measured(costs, times(of_1={"n0": 4.0, "shape": 1.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [4, 1])


def version_of(folder: Path, model: onnx_ir.Model, golden: GoldenSamples | None = None) -> ModelVersion:
    return ModelVersion(graph_path=split_graphs.save(model, folder), manifest=None, golden=golden)


def test_each_node_is_timed_without_fusions(tmp_path: Path) -> None:
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


def test_nodes_of_subgraphs_count_for_the_outer_node(tmp_path: Path) -> None:
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


def test_constant_nodes_have_no_time(tmp_path: Path) -> None:
    """Weights that are dequantized: the runtime does that while it loads the graph, or in the product itself."""
    version = version_of(tmp_path, split_graphs.quantized())
    costs = count_costs(version.graph_path, 1)
    named = {node.name for node in costs.nodes if not costs.local.intersection(node.writes)}
    assert len(named) == len(costs.nodes) - 3
    assert measure_nodes(version, largest_batch=1).at(1).keys() == named


def test_graph_that_refuses_synthetic_requests(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[3,m] y) { y = Reshape(x, s) }", s=[3, -1])
    with pytest.raises(LoweringError, match="refuses every synthetic request"):
        measure_nodes(version_of(tmp_path, model), largest_batch=1)


def test_unwritable_store_is_an_error(tmp_path: Path) -> None:
    version = version_of(tmp_path, split_graphs.mlp())
    (tmp_path / NODE_TIMES_FILE).mkdir()
    times = NodeTimes(graph="", runtime="", machine="", batches={"1": {"a": 1.0}})
    with pytest.raises(LoweringError, match="cannot write"):
        keep_times(version, times)
