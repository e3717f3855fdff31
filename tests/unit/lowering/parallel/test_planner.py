"""Plan of a spread model: numbers, stages, memory, micro-batches, and places on the machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from graphkiln_backend.graph.device import CPU, WAITING, Device, Parallelism, Place
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost, NodeTimes
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.spreading import (
    Machine,
    Planner,
    Spread,
    batch_seconds,
    check_apart,
    why_whole,
)

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


def test_explain() -> None:
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


def test_explain_measured_costs() -> None:
    seconds = {"n0": 9.0, "n1": 1.0, "n2": 1.0, "n3": 1.0}
    times = NodeTimes(graph="", runtime="onnxruntime 1", machine="a core", batches={"1": seconds})
    lines = planned(Parallelism(pipeline=2), times=times).explain().splitlines()
    assert "the fastest by measured costs" in lines[1]
    assert lines[2].startswith("costs: measured by onnxruntime 1 on a core for batches of 1 (node_times.json), 4 of 4")
    assert lines[3].startswith("stage 0 on cores 0-3: nodes 0-0")


class TestAuto:
    @pytest.mark.parametrize(
        ("memory", "pipeline", "tensor"), [(400, 1, 1), (200, 2, 1), (100, 1, 3), (70, 4, 1), (40, 1, 7), (36, 4, 2)]
    )
    def test_fewest_devices_that_fit(self, memory: int, pipeline: int, tensor: int) -> None:
        split = planned(Parallelism(auto=True, memory_bytes=memory * KIB), cores=16)
        assert (split.numbers.pipeline, split.numbers.tensor, split.numbers.auto) == (pipeline, tensor, False)

    def test_memory_is_required(self) -> None:
        with pytest.raises(LoweringError, match=r"memory of a device.*memory=2GiB"):
            planned(Parallelism(auto=True))

    def test_model_that_does_not_fit(self) -> None:
        with pytest.raises(LoweringError, match=r"auto, memory=5 KiB: the model does not fit.*2 devices available"):
            planned(Parallelism(auto=True, memory_bytes=5 * KIB), cores=2)

    def test_stages_take_turns_if_a_batch_cannot_be_split(self) -> None:
        split = planned(Parallelism(auto=True, memory_bytes=200 * KIB), batch=1, signature=ONE)
        assert (split.numbers.pipeline, split.numbers.micro_batches, split.rows) == (2, 1, 1)


HEAVY_END = (1, 1, 2, 4, 8, 16, 60, 150)
# KiB of weights of each node, as in ResNet-50: nine tenths are in nodes that take a quarter of the time
# KiB of what the nodes compute, the input first.
SHRINKING = (20, 40, 40, 20, 20, 10, 10, 5, 1)


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
    @pytest.mark.parametrize(("memory", "stages"), [(600, 1), (250, 2), (190, 2), (170, 3), (160, 3)])
    def test_memory_limit_of_each_device(self, memory: int, stages: int) -> None:
        numbers = Parallelism(auto=True, memory_bytes=memory * KIB)
        split = planned(numbers, cores=4, batch=4, count_costs=heavy_end)
        assert split.numbers.pipeline == stages
        assert max(held(split)) <= memory * KIB
        if stages > 1:
            assert f"rejected: pipeline={stages - 1}, tensor=1: no split into" in split.explain()


class TestMicroBatches:
    def test_large_weights_need_larger_micro_batches(self) -> None:
        """A product of 16 rows takes as long as reading its 64 MB."""
        heavy = partial(costs, flops=25_000_000, weights=64_000_000)
        split = planned(Parallelism(pipeline=2), count_costs=heavy)
        assert (split.numbers.micro_batches, split.rows) == (2, 16)
        assert "(1 take 1.33x, 4 take 1.67x" in split.explain()

    @pytest.mark.parametrize(
        ("requested", "batch", "found", "rows"), [(0, 3, 3, 1), (5, 32, 5, 7), (64, 8, 8, 1), (1, 8, 1, 8)]
    )
    def test_rows_of_micro_batches(self, requested: int, batch: int, found: int, rows: int) -> None:
        split = planned(Parallelism(pipeline=2, micro_batches=requested), batch=batch)
        assert (split.numbers.micro_batches, split.rows) == (found, rows)

    def test_batch_that_cannot_be_split(self) -> None:
        with pytest.raises(LoweringError, match=r"batches are of one row.*micro_batches=1 lets the stages take turns"):
            planned(Parallelism(pipeline=2), batch=1)
        assert planned(Parallelism(pipeline=2, micro_batches=1), batch=1).rows == 1

    def test_instances_that_share_stages_use_whole_batches(self) -> None:
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
    def test_reasons_against_splitting_a_batch(self, signature: Signature, words: str) -> None:
        assert why_whole(8, signature).startswith(words) if words else why_whole(8, signature) == ""

    def test_micro_batches_that_do_not_fit_are_skipped(self) -> None:
        heavy = partial(costs, flops=25_000_000, weights=64_000_000)
        numbers = Parallelism(pipeline=2, memory_bytes=2 * 64_000_000 + 400)
        assert planned(numbers, count_costs=heavy).rows == 4
        with pytest.raises(LoweringError, match="no split into 2 stages fits"):
            planned(replace(numbers, micro_batches=2), count_costs=heavy)


class TestTimeOfABatch:
    @pytest.mark.parametrize("times", [[1.0], [1.0, 1.0], [1.0, 3.0, 2.0], [5.0, 0.5]])
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_single_batch(self, times: list[float], count: int) -> None:
        assert batch_seconds(times, count) == pytest.approx(simulated(times, count, turns=1, batches=1))

    @pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 3.0, 2.0]])
    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("turns", [2, 3])
    def test_many_batches(self, times: list[float], count: int, turns: int) -> None:
        seconds, batches = batch_seconds(times, count, turns), 300
        assert seconds <= simulated(times, count, turns, batches) / batches * 1.02
        assert seconds >= simulated(times, count, len(times) * turns, batches) / batches * 0.98


def simulated(times: list[float], count: int, turns: int, batches: int) -> float:
    """Simulated end of the last of many batches, `turns` of them in flight at once."""
    free, done = [0.0] * len(times), list[float]()
    for batch in range(batches):
        ready = done[batch - turns] if batch >= turns else 0.0
        for _ in range(count):
            at = ready
            for number, seconds in enumerate(times):
                at = free[number] = max(at, free[number]) + seconds
        done.append(at)
    return done[-1]


BOTH = Parallelism(pipeline=2, tensor=2)


def on_cpu(numbers: Parallelism, cores: int, instance: int = 0, instances: int = 1) -> list[tuple[int, ...]]:
    machine = Machine(device=CPU, cores=range(10, 10 + cores), instances=instances, instance=instance)
    return [place.cores for place in machine.places(numbers)]


@pytest.mark.parametrize(
    ("count", "groups"),
    [(1, [(10, 11, 12, 13, 14)]), (2, [(10, 11, 12), (13, 14)]), (5, [(10,), (11,), (12,), (13,), (14,)])],
)
def test_groups_of_cores(count: int, groups: list[tuple[int, ...]]) -> None:
    assert on_cpu(Parallelism(pipeline=count), 5) == groups


def test_instances_share_no_core() -> None:
    numbers = Parallelism(data=2, pipeline=2)
    assert on_cpu(numbers, 4, 0, 2) == [(10,), (11,)]
    assert on_cpu(numbers, 4, 1, 2) == [(12,), (13,)]
    assert on_cpu(Parallelism(), 2, 1, 2) == [(11,)]


def test_gpus_follow_that_of_the_instance() -> None:
    found = Machine(device=Device.gpu(2), cores=[0], gpus=6, instances=2, instance=1).places(BOTH)
    assert found == tuple(Place(Device.gpu(index)) for index in (2, 3, 4, 5))


@pytest.mark.parametrize(
    ("numbers", "instances", "words"),
    [
        (Parallelism(data=2), 1, r"data=2 needs 2 instances.*its configuration has 1.*instance_group \[ \{ count: 2"),
        (Parallelism(pipeline=5), 1, r"pipeline=5, tensor=1 needs 5 groups.*4 cores"),
        (Parallelism(pipeline=2), 3, "3 instances of 2 groups; 4 cores"),
    ],
)
def test_missing_cores_or_instances(numbers: Parallelism, instances: int, words: str) -> None:
    with pytest.raises(LoweringError, match=words):
        on_cpu(numbers, 4, 0, instances)


@pytest.mark.parametrize(("gpus", "words"), [(5, "gpu:0, gpu:1, gpu:2, gpu:3, gpu:4"), (0, "none")])
def test_missing_gpus(gpus: int, words: str) -> None:
    with pytest.raises(LoweringError, match=f"needs 4 GPUs from gpu:2 on; available GPUs: {words}"):
        Machine(device=Device.gpu(2), cores=[0], gpus=gpus).places(BOTH)


class TestInstancesThatShareStages:
    NUMBERS = Parallelism(data=1, pipeline=2)

    def test_instances_of_one_copy_share_cores(self) -> None:
        assert [on_cpu(self.NUMBERS, 2, each, 2) for each in range(2)] == [[(10,), (11,)]] * 2

    def test_copies_are_taken_in_turn(self) -> None:
        numbers = Parallelism(data=2, pipeline=2)
        assert [on_cpu(numbers, 4, each, 4) for each in range(4)] == [[(10,), (11,)], [(12,), (13,)]] * 2

    @pytest.mark.parametrize(
        ("numbers", "instances", "device"),
        [
            (Parallelism(data=2, pipeline=2), 3, CPU),
            (Parallelism(data=1, tensor=2), 2, CPU),
            (Parallelism(data=1), 2, CPU),
            (NUMBERS, 2, Device.gpu(0)),
        ],
    )
    def test_sharing_that_is_refused(self, numbers: Parallelism, instances: int, device: Device) -> None:
        """Shards of a batch all work at once; on a GPU each process holds its own weights."""
        with pytest.raises(LoweringError, match=f"instances of the model.*its configuration has {instances}"):
            Machine(device=device, cores=range(8), gpus=8, instances=instances).places(numbers)


class TestGpusOfInstances:
    @pytest.mark.parametrize("gpus", [(), (3,), (0, 4), (4, 0), (0, 4, 8)])
    def test_disjoint_gpus(self, gpus: tuple[int, ...]) -> None:
        check_apart(BOTH, gpus)

    @pytest.mark.parametrize(("gpus", "shared"), [((0, 1), 1), ((2, 0, 6), 2), ((5, 5), 5)])
    def test_overlapping_gpus(self, gpus: tuple[int, ...], shared: int) -> None:
        """Each would hold parts of the model there, and there may not be memory for both."""
        words = rf"of 4 GPUs each would share gpu:{shared};.*gpus: \[ 0, 4"
        with pytest.raises(LoweringError, match=words):
            check_apart(BOTH, gpus)
