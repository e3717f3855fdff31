"""Splits on paper, by hand."""

from __future__ import annotations

import pytest
from parallel_estimate import estimate_copies, estimate_pipeline, estimate_shards

from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.lowering.parallel.speed import Speed

SPEED = Speed(flops_per_s=10.0, bytes_per_s=1e9, link_bytes_per_s=4.0, link_s=1.0)


def product(name: str, flops: int, before: str, weights: int) -> NodeCost:
    return NodeCost(
        name=name, op_type="MatMul", flops=flops, reads=(before,), writes={name: 4}, weights={f"w{name}": weights}
    )


WHOLE = GraphCosts(
    nodes=(product("a", 40, "x", 60), product("b", 40, "a", 40)), inputs={"x": 4}, outputs=frozenset("b")
)
HALF = GraphCosts(
    nodes=(
        product("a", 20, "x", 30),
        product("b", 20, "a", 20),
        NodeCost(name="sum", op_type="AllReduce", reads=("b",), writes={"c": 8}),
    ),
    inputs={"x": 4},
    outputs=frozenset("c"),
)


def test_copies() -> None:
    found = estimate_copies(WHOLE, 3, SPEED, 2)
    assert (found.latency_s, found.rate) == (pytest.approx(16.0), pytest.approx(3 * 2 / 16))
    assert (found.weight_share, found.sum_share) == (1.0, 0.0)


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    found = estimate_pipeline(WHOLE, 2, SPEED, 2)
    assert found.latency_s == pytest.approx(8 + (8 + 1 + 2 * 4 / 4))  # the second stage is handed 8 bytes
    assert found.rate == pytest.approx(2 / 11)
    assert found.weight_share == 0.6


def test_shards_compute_less_and_send_sums() -> None:
    found = estimate_shards(WHOLE, HALF, 2, SPEED, 1)
    assert found.latency_s == pytest.approx(4.0 + 1 + 8 / 4)  # 2 * 1/2 of 8 bytes
    assert found.sum_share == pytest.approx(3 / 7)
    assert found.weight_share == 0.5
    assert estimate_shards(WHOLE, HALF, 4, SPEED, 1).latency_s == pytest.approx(4.0 + 1 + 12 / 4)
