"""The plan of a model that is spread: which numbers, what each device holds, and why not otherwise.

How long a batch takes is compared with a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from graphkiln_backend.graph.device import CPU, WAITING, Parallelism
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost, NodeTimes
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.spreading import Machine, Planner, Spread, batch_seconds, why_whole

KIB = 1024


def spec(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.FP32, shape=shape)


BATCH = Signature(inputs=(spec("x", "batch", 4),), outputs=(spec("y", "batch", 4),))
ONE = Signature(inputs=(spec("x", 1, 4),), outputs=(spec("y", 1, 4),))


def costs(shards: int, *, flops: int = 1_000_000_000, weights: int = 64 * KIB) -> GraphCosts:
    """Four products, which are cut into shards."""
    nodes = tuple(
        NodeCost(
            name=f"n{number}",
            op_type="MatMul",
            flops=flops // shards,
            reads=(f"t{number}",),
            writes={f"t{number + 1}": 16},
            weights={f"w{number}": weights // shards},
        )
        for number in range(4)
    )
    return GraphCosts(nodes=nodes, inputs={"t0": 16}, outputs=frozenset(["t4"]))


def planned(
    numbers: Parallelism,
    *,
    cores: int = 8,
    batch: int = 32,
    signature: Signature = BATCH,
    count_costs: Callable[[int], GraphCosts] = costs,
    times: NodeTimes | None = None,
    turns: int = 1,
) -> Spread:
    machine = Machine(device=CPU, cores=range(cores), instances=turns)
    return Planner(
        machine=machine, count_costs=count_costs, signature=signature, largest_batch=batch, times=times
    ).plan(numbers)


def test_stages_in_words() -> None:
    split = planned(Parallelism(pipeline=2))
    assert split.cuts == (2,)
    assert (split.rows, split.numbers.micro_batches) == (1, 32)
    lines = split.explain().splitlines()
    why = "(1 take 1.94x, 2 take 1.45x, 4 take 1.21x, 8 take 1.09x, 16 take 1.03x of the time)"
    assert lines[0] == "parallel: pipeline=2, tensor=1, micro_batches=32"
    assert lines[1] == f"micro-batches of 1 row, 32 of a largest batch: the fastest by counted costs {why}"
    assert lines[2].startswith("stage 0 on cores 0-3: nodes 0-1, 2 GFLOP a sample, each device holds 128 KiB")
    assert "(50% of the model's)" in lines[2]
    assert "stage 1 on cores 4-7: nodes 2-3" in lines[3]
    assert "receives 16 bytes from the previous stage; 100% of the slowest stage's time" in lines[3]


def test_measured_costs_are_told() -> None:
    seconds = {"n0": 9.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}
    times = NodeTimes(graph="", runtime="onnxruntime 1", machine="a core", batches={"1": seconds})
    lines = planned(Parallelism(pipeline=2), times=times).explain().splitlines()
    assert "the fastest by measured costs" in lines[1]
    assert lines[2].startswith("costs: measured by onnxruntime 1 on a core for batches of 1 (node_times.json), 4 of 4")
    assert lines[3].startswith("stage 0 on cores 0-3: nodes 0-0")


def test_shards_hold_a_part_of_each_weight() -> None:
    split = planned(Parallelism(pipeline=2, tensor=2))
    assert [stage.weight_bytes for stage in split.stages] == [64 * KIB, 64 * KIB]
    assert "stage 1 on cores 4-5, cores 6-7" in split.explain()
    assert "(25% of the model's)" in split.explain()


class TestAuto:
    @pytest.mark.parametrize(
        ("memory", "pipeline", "tensor"), [(400, 1, 1), (200, 2, 1), (100, 1, 3), (70, 4, 1), (40, 1, 7), (36, 4, 2)]
    )
    def test_takes_the_fewest_devices_that_fit(self, memory: int, pipeline: int, tensor: int) -> None:
        split = planned(Parallelism(auto=True, memory_bytes=memory * KIB), cores=16)
        assert (split.numbers.pipeline, split.numbers.tensor, split.numbers.auto) == (pipeline, tensor, False)

    def test_needs_to_know_the_memory(self) -> None:
        with pytest.raises(LoweringError, match=r"memory of a device.*memory=2GiB"):
            planned(Parallelism(auto=True))

    def test_nothing_fits(self) -> None:
        with pytest.raises(LoweringError, match=r"auto, memory=5 KiB: the model does not fit.*2 devices available"):
            planned(Parallelism(auto=True, memory_bytes=5 * KIB), cores=2)

    def test_stages_take_turns_where_a_batch_cannot_be_split(self) -> None:
        split = planned(Parallelism(auto=True, memory_bytes=200 * KIB), batch=1, signature=ONE)
        assert (split.numbers.pipeline, split.numbers.micro_batches, split.rows) == (2, 1, 1)


HEAVY_END = (1, 1, 2, 4, 8, 16, 60, 150)
"""KiB of the weights of each node of a net as ResNet-50 is: nine tenths lie in what takes a quarter of the time."""
SHRINKING = (20, 40, 40, 20, 20, 10, 10, 5, 1)
"""KiB of what the nodes compute, the input first."""


def heavy_end(shards: int) -> GraphCosts:
    if shards > 1:
        raise LoweringError("no product can be cut", attempts=())
    nodes = tuple(
        NodeCost(
            name=f"n{number}",
            op_type="Conv",
            flops=1_000_000_000,
            reads=(f"t{number}",),
            writes={f"t{number + 1}": SHRINKING[number + 1] * KIB},
            weights={f"w{number}": weights * KIB},
        )
        for number, weights in enumerate(HEAVY_END)
    )
    return GraphCosts(nodes=nodes, inputs={"t0": SHRINKING[0] * KIB}, outputs=frozenset(["t8"]))


def held(split: Spread) -> list[int]:
    """Bytes that each device has to hold, counted by hand: weights, the largest step, what waits for the next stage."""
    found, waiting = [], min(WAITING, split.numbers.micro_batches - 1)
    for begin, end in itertools.pairwise((0, *split.cuts, len(HEAVY_END))):
        largest = max(SHRINKING[number] + SHRINKING[number + 1] for number in range(begin, end))
        queued = waiting * SHRINKING[end] if end < len(HEAVY_END) else 0
        found.append(KIB * (sum(HEAVY_END[begin:end]) + split.rows * (largest + queued)))
    return found


class TestMemory:
    """Of a net whose fastest stages leave nearly all weights to the last device."""

    def test_balanced_time_leaves_the_last_device_nearly_all_weights(self) -> None:
        split = planned(Parallelism(pipeline=2), batch=4, count_costs=heavy_end)
        assert [stage.weight_bytes for stage in split.stages] == [8 * KIB, 234 * KIB]
        assert [stage.memory_bytes for stage in split.stages] == held(split)

    @pytest.mark.parametrize(("memory", "stages"), [(600, 1), (250, 2), (190, 2), (170, 3), (160, 3)])
    def test_no_device_holds_more_than_it_has(self, memory: int, stages: int) -> None:
        numbers = Parallelism(auto=True, memory_bytes=memory * KIB)
        split = planned(numbers, cores=4, batch=4, count_costs=heavy_end)
        assert split.numbers.pipeline == stages
        assert max(held(split)) <= memory * KIB
        if stages > 1:
            assert f"rejected: pipeline={stages - 1}, tensor=1: no split into" in split.explain()

    def test_what_fits_no_device_is_refused(self) -> None:
        """The last node's weights alone take 150 KiB."""
        with pytest.raises(LoweringError, match=r"does not fit.*the smallest needs 15\d.* KiB"):
            planned(Parallelism(auto=True, memory_bytes=150 * KIB), cores=8, batch=4, count_costs=heavy_end)


class TestMicroBatches:
    def test_large_weights_are_read_less_often(self) -> None:
        """A product of 16 rows takes as long as reading its 64 MB: fewer rows at a time would read them for nothing."""
        heavy = partial(costs, flops=25_000_000, weights=64_000_000)
        split = planned(Parallelism(pipeline=2), count_costs=heavy)
        assert (split.numbers.micro_batches, split.rows) == (2, 16)
        assert "(1 take 1.33x, 4 take 1.67x" in split.explain()

    @pytest.mark.parametrize(
        ("asked", "batch", "found", "rows"), [(0, 3, 3, 1), (5, 32, 5, 7), (64, 8, 8, 1), (1, 8, 1, 8)]
    )
    def test_numbers_and_rows(self, asked: int, batch: int, found: int, rows: int) -> None:
        split = planned(Parallelism(pipeline=2, micro_batches=asked), batch=batch)
        assert (split.numbers.micro_batches, split.rows) == (found, rows)

    def test_a_batch_that_cannot_be_split_is_refused_unless_stages_may_take_turns(self) -> None:
        with pytest.raises(LoweringError, match=r"batches are of one row.*micro_batches=1 lets the stages take turns"):
            planned(Parallelism(pipeline=2), batch=1)
        assert planned(Parallelism(pipeline=2, micro_batches=1), batch=1).rows == 1

    def test_instances_that_share_stages_need_no_cutting(self) -> None:
        split = planned(Parallelism(data=1, pipeline=2), turns=2)
        assert (split.numbers.micro_batches, split.rows) == (1, 32)
        assert "2 instances share these devices and overlap their batches" in split.explain()
        alone = planned(Parallelism(pipeline=2, micro_batches=1))
        assert [stage.activation_bytes for stage in split.stages] == [
            2 * stage.activation_bytes for stage in alone.stages
        ]
        assert "share" not in alone.explain()

    @pytest.mark.parametrize(
        ("signature", "words"),
        [
            (BATCH, ""),
            (ONE, "the first dimension of 'x' is not the batch"),
            (
                Signature(inputs=(spec("x", "all"), spec("ends", "requests")), outputs=(spec("y", "all"),)),
                "the first dimensions of x, ends need not be equal",
            ),
            (Signature(inputs=(spec("x", "batch"),), outputs=(spec("y", "?y.0"),)), "the first dimension of 'y'"),
        ],
    )
    def test_why_a_batch_cannot_be_split(self, signature: Signature, words: str) -> None:
        assert why_whole(8, signature).startswith(words) if words else why_whole(8, signature) == ""

    def test_parts_whose_activations_do_not_fit_are_not_considered(self) -> None:
        heavy = partial(costs, flops=25_000_000, weights=64_000_000)
        numbers = Parallelism(pipeline=2, memory_bytes=2 * 64_000_000 + 400)
        assert planned(numbers, count_costs=heavy).rows == 4
        with pytest.raises(LoweringError, match="no split into 2 stages fits"):
            planned(replace(numbers, micro_batches=2), count_costs=heavy)


class TestTimeOfABatch:
    @pytest.mark.parametrize("times", [[1.0], [1.0, 1.0], [1.0, 3.0, 2.0], [5.0, 0.5]])
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_alone(self, times: list[float], count: int) -> None:
        assert batch_seconds(times, count) == pytest.approx(simulated(times, count, turns=1, batches=1))

    @pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 3.0, 2.0]])
    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("turns", [2, 3])
    def test_among_others(self, times: list[float], count: int, turns: int) -> None:
        """A stage is never idle, or all that are under way pass it one by one."""
        seconds, batches = batch_seconds(times, count, turns), 300
        assert seconds <= simulated(times, count, turns, batches) / batches * 1.02
        assert seconds >= simulated(times, count, len(times) * turns, batches) / batches * 0.98


def simulated(times: list[float], count: int, turns: int, batches: int) -> float:
    """When the last of many batches is done, as many of which as `turns` are under way at once."""
    free, done = [0.0] * len(times), list[float]()
    for batch in range(batches):
        ready = done[batch - turns] if batch >= turns else 0.0
        for _ in range(count):
            at = ready
            for number, seconds in enumerate(times):
                at = free[number] = max(at, free[number]) + seconds
        done.append(at)
    return done[-1]
