"""Plans by measured times: what they change, what fills gaps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import split_graphs

from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost, NodeTimes
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import CPU_CORE, MeasuredSpeed, Speed
from graphkiln_backend.lowering.parallel.stages import find_stages

COUNTED = Speed(flops_per_s=1.0, bytes_per_s=1e12, link_bytes_per_s=1e12, link_s=0.0)
"""A second for each operation."""


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


def test_what_was_measured_counts() -> None:
    costs = chain(1, 1, 1, 1)
    speed = measured(costs, times(of_1={"n0": 9.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [9, 1, 1, 1])
    assert [stage.begin for stage in find_stages(costs, 2, speed)] == [0, 1]
    assert [stage.begin for stage in find_stages(costs, 2, COUNTED)] == [0, 2]
    assert speed.link_seconds(8) == COUNTED.link_seconds(8)


def test_a_node_without_a_time_has_its_counted_share() -> None:
    """Of four times as long as counted, like the rest; which is said."""
    costs = chain(2, 1, 5)
    speed = measured(costs, times(of_1={"n0": 8.0, "n1": 4.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [8, 4, 20])
    assert speed.explain() == (
        "costs: measured by onnxruntime 1 on a core for batches of 1 (node_times.json), 2 of 3 nodes; the other 1 by "
        "counted costs"
    )


def test_names_that_the_graph_does_not_have_leave_counted_costs() -> None:
    costs = chain(2, 1)
    speed = measured(costs, times(of_1={"else": 8.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [2, 1])
    assert "0 of 2 nodes" in speed.explain()


def test_between_two_batch_sizes_and_beyond() -> None:
    """As many times the counted cost as there: 1 for one row, 3 for five, 2 halfway."""
    costs = chain(1)
    speed = measured(costs, times(of_1={"n0": 1.0}, of_5={"n0": 15.0}))
    assert [float(speed.node_seconds(costs, rows)[0]) for rows in (1, 3, 5, 10)] == pytest.approx([1, 6, 15, 30])
    assert "for batches of 1 and 5" in speed.explain()


def test_a_shard_takes_its_part_of_what_the_whole_node_took() -> None:
    costs = chain(8, 2)
    shard = replace(costs, nodes=(replace(costs.nodes[0], flops=4), costs.nodes[1]))
    speed = measured(costs, times(of_1={"n0": 80.0, "n1": 2.0}))
    np.testing.assert_allclose(speed.node_seconds(shard, 1), [40, 2])


def test_a_node_that_is_counted_as_nothing_may_take_time() -> None:
    costs = chain(4)
    costs = replace(costs, nodes=(*costs.nodes, NodeCost(name="shape", op_type="Shape")))
    speed = measured(costs, times(of_1={"n0": 4.0, "shape": 1.0}))
    np.testing.assert_allclose(speed.node_seconds(costs, 1), [4, 1])


SLOW = {"Conv": 5.0, "MatMul": 1.0, "Gemm": 1.0, "Softmax": 40.0, "Gelu": 30.0, "GlobalAveragePool": 10.0}
"""A machine whose nodes take so many times as long as counted; others three times."""


@pytest.mark.parametrize("make", [split_graphs.convolutions, split_graphs.attention])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_are_balanced_better_or_as_well(tmp_path: Path, make: Callable[[], onnx_ir.Model], stages: int) -> None:
    """A net of convolutions and a block of a transformer, on a machine that is not as counted."""
    costs = count_costs(split_graphs.save(make(), tmp_path), 1)
    counted = CPU_CORE.node_seconds(costs, 4)
    truth = counted * [SLOW.get(node.op_type, 3.0) for node in costs.nodes] * 1000  # links weigh nothing beside it
    found = times(of_4={node.name: float(taken) for node, taken in zip(costs.nodes, truth, strict=True)})

    def slowest(speed: Speed) -> float:
        return max(truth[stage.begin : stage.end].sum() for stage in find_stages(costs, stages, speed, rows=4))

    assert slowest(MeasuredSpeed.of(CPU_CORE, found, costs)) <= slowest(CPU_CORE)
