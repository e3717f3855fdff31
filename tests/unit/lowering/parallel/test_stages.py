"""Cutting a graph into stages, compared with brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.lowering.parallel.speed import Speed
from graphkiln_backend.lowering.parallel.stages import StageCost, find_cuts, find_stages

SPEED = Speed(flops_per_s=1.0, bytes_per_s=1e12, link_bytes_per_s=1.0, link_s=0.0)
# a second for each operation, and for each transferred byte


def chain(
    flops: list[int],
    sizes: list[int] | None = None,
    weights: list[dict[str, int]] | None = None,
    fuses: str = "",
    opens: str = "",
) -> GraphCosts:
    """Nodes that read from each other: `t0` is the input, node `i` computes `t(i+1)`."""
    sizes = sizes or [1] * (len(flops) + 1)
    nodes = tuple(
        NodeCost(
            name=f"n{number}",
            op_type="MatMul",
            flops=each,
            reads=(f"t{number}",),
            writes={f"t{number + 1}": sizes[number + 1]},
            weights=weights[number] if weights else {},
            fuses=str(number) in fuses,
            opens=str(number) in opens,
        )
        for number, each in enumerate(flops)
    )
    return GraphCosts(nodes=nodes, inputs={"t0": sizes[0]}, outputs=frozenset([f"t{len(flops)}"]))


def begins(stages: tuple[StageCost, ...]) -> list[int]:
    return [stage.begin for stage in stages]


def test_equal_splits_are_ordered_by_transfers() -> None:
    free = Speed(flops_per_s=1.0, bytes_per_s=1e12, link_bytes_per_s=1e30, link_s=0.0)
    assert begins(find_stages(chain([2, 0, 0, 2], [1, 9, 3, 5, 1]), 2, free)) == [0, 2]


def brute_force(costs: GraphCosts, stages: int, rows: int, memory: int) -> float:
    """Time of the slowest stage of the best split, counted node by node.

    The fastest, unless another one takes at most 6% more and no device of it holds more than its share and a tenth.
    """
    total = sum({name: size for node in costs.nodes for name, size in node.weights.items()}.values())
    found = [
        count_split(costs, (0, *inner, len(costs.nodes)), rows, memory)
        for inner in itertools.combinations(range(1, len(costs.nodes)), stages - 1)
    ]
    fastest = min(worst for worst, _ in found)
    light = [worst for worst, most in found if most <= (1 / stages + 0.1) * total and worst <= 1.06 * fastest]
    return min(light, default=fastest)


def count_split(costs: GraphCosts, places: tuple[int, ...], rows: int, memory: int) -> tuple[float, int]:
    """The slowest stage (infinite where one does not fit), and the most weights that one holds."""
    sizes = dict(costs.inputs)
    for node in costs.nodes:
        sizes |= node.writes
    worst, most = 0.0, 0
    for begin, end in itertools.pairwise(places):
        own = costs.nodes[begin:end]
        read = {name for node in costs.nodes[begin:] for name in node.reads}
        before = {name for node in costs.nodes[:begin] for name in node.writes} | set(costs.inputs)
        handed = rows * sum(sizes[name] for name in read & before) if begin else 0
        alive = 0
        for position in range(begin, end):
            later = {name for node in costs.nodes[position:] for name in node.reads}
            there = {name for node in costs.nodes[:position] for name in node.writes} | set(costs.inputs)
            here = later & there | set(costs.nodes[position].writes)
            alive = max(alive, rows * sum(sizes[name] for name in here))
        weights = {name: size for node in own for name, size in node.weights.items()}
        fits = not memory or sum(weights.values()) + alive <= memory
        worst = max(worst, rows * sum(node.flops for node in own) + handed if fits else np.inf)
        most = max(most, sum(weights.values()))
    return worst, most


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_split_equals_brute_force(seed: int, stages: int) -> None:
    """Random graphs with branches, shared weights and a limit of memory."""
    draw = np.random.default_rng(seed)
    nodes, names = [], ["t0"]
    for number in range(7):
        reads = tuple({names[index] for index in draw.integers(len(names), size=2)})
        weight = f"w{draw.integers(4)}"
        nodes.append(
            NodeCost(
                name=f"n{number}",
                op_type="MatMul",
                flops=int(draw.integers(20)),
                reads=reads,
                writes={f"t{number + 1}": int(draw.integers(1, 9))},
                weights={weight: 10 * (1 + int(weight[1:]))} if draw.integers(2) else {},
            )
        )
        names.append(f"t{number + 1}")
    costs = GraphCosts(nodes=tuple(nodes), inputs={"t0": 3}, outputs=frozenset(["t7"]))
    memory = 90 if seed % 2 else 0
    expected = brute_force(costs, stages, 2, memory)
    if np.isinf(expected):
        with pytest.raises(LoweringError, match="fits 90 bytes for each device"):
            find_stages(costs, stages, SPEED, rows=2, memory_bytes=memory)
        return
    found = find_stages(costs, stages, SPEED, rows=2, memory_bytes=memory)
    assert max(stage.seconds for stage in found) == pytest.approx(expected)
    assert all(stage.memory_bytes <= memory for stage in found if memory)
    assert [stage.begin for stage in found[1:]] == [stage.end for stage in found[:-1]]


class TestWeights:
    """A token table, which takes no time, before ten products; all but the fifth have 100 operations."""

    @pytest.mark.parametrize(
        ("table", "fifth", "weights", "seconds"),
        [
            (40, 20, [80, 60], [400, 520]),  # 4% slower than [420, 500], in which a device holds 90 of 140 bytes
            (40, 35, [90, 50], [435, 500]),  # 7% would be too much
            (20, 20, [70, 50], [420, 500]),  # 70 of 120 bytes are no more than half and a tenth
        ],
    )
    def test_balanced_weights_are_preferred_at_little_cost(
        self, table: int, fifth: int, weights: list[int], seconds: list[int]
    ) -> None:
        products = [100] * 4 + [fifth] + [100] * 5
        held = [{"table": table}, *({f"w{number}": 10} for number in range(10))]
        stages = find_stages(chain([0, *products], [0] * 12, held), 2, SPEED)
        assert [stage.weight_bytes for stage in stages] == weights
        assert [stage.seconds for stage in stages] == pytest.approx(seconds)


class TestCuts:
    def test_fused_nodes_are_not_separated(self) -> None:
        assert find_cuts(chain([1] * 5, fuses="24")) == [0, 1, 3, 5]
        assert find_cuts(chain([1] * 5, opens="2")) == [0, 1, 2, 4, 5]

    def test_fused_nodes_are_separated_if_necessary(self) -> None:
        assert find_cuts(chain([1] * 3, fuses="012")) == [0, 1, 2, 3]

    def test_local_tensors_never_cross_a_cut(self) -> None:
        whole = chain([1] * 4)
        costs = GraphCosts(nodes=whole.nodes, inputs=whole.inputs, outputs=whole.outputs, local=frozenset(["t1", "t2"]))
        assert find_cuts(costs) == [0, 3, 4]


class TestRefusals:
    def test_too_few_places(self) -> None:
        with pytest.raises(LoweringError, match=r"cannot be cut into 3 stages; it can be cut at 1 places"):
            find_stages(chain([1, 1]), 3, SPEED)

    def test_waiting_micro_batches_take_memory(self) -> None:
        """Two micro-batches of two rows, of 10 bytes each, beside those that are alive while a stage computes."""
        wide = chain([1, 1, 1, 1], [1, 20, 10, 20, 1])
        none, some = (find_stages(wide, 2, SPEED, rows=2, waiting=waiting) for waiting in (0, 2))
        assert begins(none) == begins(some) == [0, 2]
        assert [stage.activation_bytes for stage in none] == [60, 60]
        assert [stage.activation_bytes for stage in some] == [100, 60]
        with pytest.raises(LoweringError, match="the smallest needs 100 bytes"):
            find_stages(wide, 2, SPEED, rows=2, waiting=2, memory_bytes=61)
