"""How long nodes take, by hand."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.lowering.parallel.speed import Speed

COSTS = GraphCosts(
    nodes=(
        NodeCost(name="product", op_type="MatMul", flops=4000, weights={"w": 100}, reads=("x",), writes={"h": 20}),
        NodeCost(name="relu", op_type="Relu", reads=("h",), writes={"y": 20}),
    ),
    inputs={"x": 40},
    outputs=frozenset(["y"]),
)


def test_a_node_takes_as_long_as_its_arithmetic_or_its_bytes() -> None:
    speed = Speed(flops_per_s=1000.0, bytes_per_s=10.0, link_bytes_per_s=5.0, link_s=0.5)
    assert list(speed.node_seconds(COSTS, 1)) == [16.0, 4.0]  # (100 + 40 + 20) / 10, (20 + 20) / 10
    assert list(speed.node_seconds(COSTS, 10)) == [70.0, 40.0]  # weights are read once; 700 bytes beside 40 s
    assert speed.link_seconds(10) == pytest.approx(2.5)


def test_arithmetic_counts_where_it_takes_longer() -> None:
    speed = Speed(flops_per_s=100.0, bytes_per_s=10.0, link_bytes_per_s=5.0, link_s=0.0)
    assert list(speed.node_seconds(COSTS, 1)) == [40.0, 4.0]
