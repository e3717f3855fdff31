"""Plan how a model is spread over devices: its numbers, its stages, what each device holds, and why.

A graph is cut into consecutive stages: the exact best of all cuts, by dynamic programming. The best split has the
shortest slowest stage, since a pipeline is as fast as that; a stage's time holds what the tensors that it is handed
take. Of splits that are as fast, the one across whose cuts less passes is taken. Where a device would hold more than
its share of the weights and a tenth of all, a split that is a little slower and holds less is taken instead.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.1 (the
partitioning algorithm; stages of one device each).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.device import WAITING, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeTimes
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.places import counted
from graphkiln_backend.lowering.parallel.speed import CPU_CORE, PCIE_GPU, MeasuredSpeed, Speed

Floats = npt.NDArray[np.float64]
CountCosts = Callable[[int], GraphCosts]  # number of shards -> the costs of one of them
FindPlaces = Callable[[Parallelism], tuple[Place, ...]]

_EQUAL = 1e-9  # stages that are less than this share apart are as fast
_AIM = 0.1  # of all weights: what a device may hold beside an equal share
# Of the slowest stage's time: what holding no more than that may cost. Two stages of BERT-base give up a third of a
# layer for it, since the table of its tokens, a fifth of its weights, takes no time.
_WORTH = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """A stage: the nodes from `begin` to before `end`.

    Attributes:
        begin: Position of its first node.
        end: Position behind its last node.
        seconds: Time of a micro-batch, with what it takes to hand its inputs over.
        weight_bytes: Its weights; one that another stage reads, too, is held by both.
        activation_bytes: Most that is alive at once while it computes a micro-batch, and what waits for the next stage.
        handed_bytes: Inputs from the stage before for a micro-batch.
        flops: Arithmetic of one sample.
    """

    begin: int
    end: int
    seconds: float
    weight_bytes: int
    activation_bytes: int
    handed_bytes: int
    flops: int

    @property
    def memory_bytes(self) -> int:
        """Memory that its device needs."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Spread of one copy of a model.

    Attributes:
        numbers: The requested numbers, and those that were left open.
        stages: Costs of each stage on one of its devices.
        places: Place of each shard of each stage, stage by stage.
        rows: Samples of a micro-batch.
        whole: Costs of the whole graph.
        why: Reason for the number of micro-batches; empty where it was requested.
        tried: With `auto`: reasons against smaller numbers, a line each.
        basis: Source of the costs, if they were measured.
        turns: Instances that share the devices.
    """

    numbers: Parallelism
    stages: tuple[StageCost, ...]
    places: tuple[Place, ...]
    rows: int
    whole: GraphCosts
    why: str = ""
    tried: tuple[str, ...] = ()
    basis: str = ""
    turns: int = 1

    @property
    def cuts(self) -> tuple[int, ...]:
        """Positions of the first node of each stage but the first."""
        return tuple(stage.begin for stage in self.stages[1:])

    def explain(self) -> str:
        """Describe the numbers, and what each device computes and holds, a line each."""
        return "\n".join((f"parallel: {self.numbers}", *self._lines(), *(f"rejected: {line}" for line in self.tried)))

    def _lines(self) -> Iterator[str]:
        if self.numbers.pipeline > 1:
            why = f": {self.why}" if self.why else ""
            yield f"micro-batches of {counted(self.rows, 'row')}, {self.numbers.micro_batches} of a largest batch{why}"
        if self.turns > 1:
            yield f"{self.turns} instances share these devices: while a batch of one ends, one of another begins"
        if self.basis:
            yield self.basis
        slowest = max(stage.seconds for stage in self.stages) or 1.0
        total = max(1, self.whole.weight_bytes)
        for number, stage in enumerate(self.stages):
            own = self.places[number * self.numbers.tensor : (number + 1) * self.numbers.tensor]
            places = ", ".join(map(str, own))
            held = f"{format_size(stage.weight_bytes)} of weights ({stage.weight_bytes / total:.0%} of the model's)"
            handed = f", takes {format_size(stage.handed_bytes)} from the stage before" if stage.handed_bytes else ""
            yield (
                f"stage {number} on {places}: nodes {stage.begin}-{stage.end - 1}, "
                f"{stage.flops / 1e9:.3g} GFLOP a sample, each device "
                f"holds {held} and {format_size(stage.activation_bytes)} of activations{handed}; "
                f"{stage.seconds / slowest:.0%} of the slowest stage's time"
            )


def plan_split(
    numbers: Parallelism,
    count_costs: CountCosts,
    find_places: FindPlaces,
    *,
    devices: int,
    largest_batch: int,
    signature: Signature,
    times: NodeTimes | None = None,
    turns: int = 1,
) -> Split:
    """Plan how a model is spread.

    Args:
        numbers: The requested numbers.
        count_costs: Counts the costs of a shard.
        find_places: Finds the places of an instance.
        devices: Groups of cores, or GPUs, that one copy may use at most.
        largest_batch: The largest batch that will be requested.
        signature: Signature of the graph.
        times: Measured times of the graph's nodes on a core; None where costs are counted.
        turns: Instances that share the devices of a copy, each computing another batch.

    Raises:
        LoweringError: It cannot be spread as requested; `attempts` says why.
    """
    try_out = partial(
        _plan, count_costs, find_places, times, largest_batch=largest_batch, signature=signature, turns=turns
    )
    if not numbers.auto:
        return try_out(numbers)
    if not numbers.memory_bytes:
        raise LoweringError(
            "parallel: auto fits a model into memory",
            attempts=("the memory of a device is not given",),
            hint="write parallel: auto, memory=2GiB",
        )
    tried: list[str] = []
    for candidate in _candidates(numbers, devices, largest_batch, signature):
        try:
            split = try_out(candidate)
        except LoweringError as error:
            tried.append(f"pipeline={candidate.pipeline}, tensor={candidate.tensor}: {error.message}")
        else:
            return replace(split, tried=tuple(tried))
    raise LoweringError(
        f"{numbers}: no numbers fit",
        attempts=tuple(tried),
        hint=f"{counted(devices, 'device')} can be used: give them more `memory`, or more devices",
    )


def _candidates(numbers: Parallelism, devices: int, largest_batch: int, signature: Signature) -> Iterator[Parallelism]:
    """The fewest devices first; of as many, stages before shards, which send less."""
    for count in range(1, devices + 1):
        for tensor in (each for each in range(1, count + 1) if count % each == 0):
            chosen = numbers.of(count // tensor, tensor)
            if chosen.pipeline > 1 and not chosen.micro_batches and why_whole(largest_batch, signature):
                chosen = replace(chosen, micro_batches=1)  # who asks for memory alone is served with stages in turn
            yield chosen


def _plan(
    count_costs: CountCosts,
    find_places: FindPlaces,
    times: NodeTimes | None,
    numbers: Parallelism,
    *,
    largest_batch: int,
    signature: Signature,
    turns: int,
) -> Split:
    places = find_places(numbers)
    counts = _micro_batches(numbers, largest_batch, signature, turns)
    costs = count_costs(numbers.tensor)
    speed: Speed = CPU_CORE
    if places[0].device.is_gpu:
        speed = PCIE_GPU  # times that were measured on a core say nothing of it
    elif times:
        speed = MeasuredSpeed.of(CPU_CORE, times, count_costs(1))

    def find(rows: int) -> tuple[StageCost, ...]:
        return find_stages(
            costs,
            numbers.pipeline,
            speed,
            rows=rows,
            memory_bytes=numbers.memory_bytes,
            waiting=min(WAITING, math.ceil(largest_batch / rows) - 1),
            turns=turns,
        )

    cutting = cut_batch(find, largest_batch, counts, turns)
    whole = count_costs(1) if numbers.tensor > 1 else costs
    basis = speed.explain() if isinstance(speed, MeasuredSpeed) else ""
    return Split(
        numbers=replace(numbers, micro_batches=cutting.count if numbers.pipeline > 1 else 0),
        stages=cutting.stages,
        places=places,
        rows=cutting.rows,
        whole=whole,
        why=cutting.explain("measured" if basis else "counted"),
        basis=basis,
        turns=turns,
    )


def _micro_batches(numbers: Parallelism, largest_batch: int, signature: Signature, turns: int) -> tuple[int, ...]:
    """Numbers of parts into which a largest batch may be cut.

    Raises:
        LoweringError: A batch cannot be split, and stages may not take turns.
    """
    if numbers.pipeline == 1 or numbers.micro_batches == 1:
        return (1,)
    if reason := why_whole(largest_batch, signature):
        if turns > 1 and not numbers.micro_batches:
            return (1,)  # the stages work on the batches of several instances
        raise LoweringError(
            f"{numbers} would compute parts of a batch side by side",
            attempts=(reason,),
            hint="micro_batches=1 lets the stages take turns: less memory on each device, and no more speed; on cores, "
            f"data=1 with {numbers.pipeline} instances keeps all of them at work",
        )
    return (min(numbers.micro_batches, largest_batch),) if numbers.micro_batches else usual_counts(largest_batch)


def why_whole(largest_batch: int, signature: Signature) -> str:
    """Reason why a batch cannot be split; empty where it can."""
    if largest_batch < 2:
        return "batches are of one row (max_batch_size)"
    fixed = [spec.name for spec in (*signature.inputs, *signature.outputs) if not spec.batchable]
    if fixed:
        return f"the first dimension of '{fixed[0]}' is not the batch"
    if len({spec.shape[0] for spec in signature.inputs}) > 1:
        return f"the first dimensions of {', '.join(spec.name for spec in signature.inputs)} need not be equal"
    return ""


FindStages = Callable[[int], tuple[StageCost, ...]]  # rows of a micro-batch -> the best stages for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """Micro-batches of a largest batch.

    More of them keep more stages at work, and each one reads all weights of a stage again and is handed over alone.

    Attributes:
        count: Number of micro-batches.
        rows: Rows of each, at most.
        stages: Costs of each stage for one of them.
        others: Other counts that were considered -> seconds of a batch.
        turns: Batches that may be under way at once.
    """

    count: int
    rows: int
    stages: tuple[StageCost, ...]
    others: Mapping[int, float] = field(default_factory=dict)
    turns: int = 1

    @property
    def seconds(self) -> float:
        """Time of a batch: the first part passes all stages, then the slowest one takes its time for each more.

        Where several batches are under way, each takes its share of that, or as long as the slowest stage needs for it.
        """
        times = [stage.seconds for stage in self.stages]
        alone = sum(times) + (self.count - 1) * max(times)
        return max(alone / self.turns, self.count * max(times))

    def explain(self, costs: str = "counted") -> str:
        """Reason for the count by `counted` or `measured` costs; empty where it was requested."""
        if not self.others:
            return ""
        beside = ", ".join(f"{count} take {seconds / self.seconds:.2f}x" for count, seconds in self.others.items())
        return f"the fastest by {costs} costs ({beside} of the time)"


def cut_batch(find: FindStages, largest_batch: int, counts: Sequence[int], turns: int = 1) -> Cutting:
    """Find the cutting by which a batch is over first; of those that are as fast, the one with the fewest parts.

    Args:
        find: Finds the stages; raises `LoweringError` where none fit.
        largest_batch: Rows.
        counts: Numbers of micro-batches to choose from, ascending.
        turns: Batches that may be under way at once.

    Raises:
        LoweringError: Stages fit for none of them; as for the one that needs the least memory.
    """
    found: list[Cutting] = []
    refused: LoweringError | None = None
    for count in counts:
        rows = math.ceil(largest_batch / count)
        try:
            found.append(Cutting(count=count, rows=rows, stages=find(rows), turns=turns))
        except LoweringError as error:
            refused = error
    if not found:
        raise refused or LoweringError("there is no batch to cut", attempts=(f"{largest_batch} rows",))
    best = min(found, key=lambda cutting: cutting.seconds)
    others = {cutting.count: cutting.seconds for cutting in found if cutting is not best}
    return replace(best, others=others)


def usual_counts(largest_batch: int) -> tuple[int, ...]:
    """Numbers of micro-batches to consider for a largest batch of rows: powers of two, and parts of one row."""
    powers = [1 << exponent for exponent in range(largest_batch.bit_length())]
    return tuple(sorted({*powers, largest_batch}))


def find_stages(
    costs: GraphCosts,
    stages: int,
    speed: Speed,
    *,
    rows: int = 1,
    memory_bytes: int = 0,
    waiting: int = 0,
    turns: int = 1,
) -> tuple[StageCost, ...]:
    """Find the best split into stages.

    Args:
        costs: Costs of the graph.
        stages: Number of stages.
        speed: Speed of each device.
        rows: Samples of a micro-batch.
        memory_bytes: Memory of a device; 0 for no limit.
        waiting: Micro-batches that may wait for the next stage.
        turns: Batches that may be under way at once, of instances that share the devices and their weights.

    Raises:
        LoweringError: There are not that many places to cut, or no split fits the memory.
    """
    table = _Table(costs, speed, rows=rows, stages=stages, waiting=waiting, turns=turns)
    if len(table.positions) - 1 < stages:
        raise LoweringError(
            f"the graph cannot be cut into {stages} stages",
            attempts=(f"it has {max(0, len(table.positions) - 2)} places where it can be cut",),
            hint="choose a smaller `pipeline`",
        )
    seconds = table.seconds()
    memory = table.memory()
    if memory_bytes:
        seconds = np.where(memory <= memory_bytes, seconds, np.inf)
    crossing = table.crossing[table.positions]
    chosen = _partition(seconds, crossing, stages)
    if chosen is None:
        least = max(memory[a, b] for a, b in itertools.pairwise(_partition(memory, crossing, stages) or []))
        raise LoweringError(
            f"no split into {stages} stage{'s' if stages > 1 else ''} fits {format_size(memory_bytes)} for each device",
            attempts=(f"the smallest needs {format_size(int(least))}",),
            hint="choose more stages or shards, smaller micro-batches, or more `memory`",
        )
    chosen = _lighter(table, seconds, chosen)
    return tuple(table.stage(a, b, float(seconds[a, b])) for a, b in itertools.pairwise(chosen))


def _lighter(table: _Table, seconds: Floats, chosen: list[int]) -> list[int]:
    """The fastest split whose devices hold no more than `_AIM` allows, where it is nearly as fast as the chosen one."""
    stages = len(chosen) - 1
    weights = table.weight_spans
    light = np.where(weights <= (1 / stages + _AIM) * weights[0, -1], seconds, np.inf)
    found = _partition(light, table.crossing[table.positions], stages)
    if found is None or _slowest(seconds, found) > (1 + _WORTH) * _slowest(seconds, chosen):
        return chosen
    return found


def _slowest(seconds: Floats, places: list[int]) -> float:
    return max(float(seconds[a, b]) for a, b in itertools.pairwise(places))


def find_cuts(costs: GraphCosts, stages: int = 2) -> list[int]:
    """Find positions of nodes before which a graph can be cut, the first and the one behind the last among them.

    Nothing that runtimes fuse is separated, unless that leaves too few places for so many stages.
    """
    count = len(costs.nodes)
    lives = _lifetimes(costs)
    impossible = np.zeros(count + 1, bool)
    for name in costs.local:
        begin, end = lives.get(name, (0, 0))
        impossible[begin + 1 : end + 1] = True
    separating = impossible.copy()
    for position, node in enumerate(costs.nodes):
        latest = max((lives[name][0] for name in node.reads if name in lives), default=-1)
        if node.fuses and latest >= 0:
            separating[latest + 1 : position + 1] = True
        if node.opens:
            last = max((lives[name][1] for name in node.writes if name in lives), default=position)
            separating[position + 1 : last + 1] = True
    for forbidden in (separating, impossible):
        inner = [position for position in range(1, count) if not forbidden[position]]
        if len(inner) >= stages - 1:
            break
    return [0, *inner, count]


def _lifetimes(costs: GraphCosts) -> dict[str, tuple[int, int]]:
    """Position at which each activation is computed (-1 for an input of the graph), and of its last reader."""
    lives: dict[str, tuple[int, int]] = dict.fromkeys(costs.inputs, (-1, -1))
    for position, node in enumerate(costs.nodes):
        for name in node.reads:
            if name in lives:
                lives[name] = (lives[name][0], position)
        lives |= dict.fromkeys(node.writes, (position, position))
    return lives


class _Table:
    """Costs of every span of nodes between two places as a stage."""

    def __init__(self, costs: GraphCosts, speed: Speed, *, rows: int, stages: int, waiting: int, turns: int) -> None:
        self._costs = costs
        self._speed = speed
        self._rows = rows
        self.positions = np.array(find_cuts(costs, stages) if stages > 1 else [0, len(costs.nodes)])
        self.crossing = rows * _crossing(costs)
        self._nodes_s = np.concatenate([[0.0], np.cumsum(speed.node_seconds(costs, rows))])
        writes = [sum(node.writes.values()) for node in costs.nodes]
        self._alive = self.crossing[:-1] + rows * np.array(writes, np.float64)
        self.weight_spans = self._weight_spans()
        queued = waiting * self.crossing[self.positions][None, :]
        self._activations = turns * (self._activation_spans() + queued)

    def seconds(self) -> Floats:
        """Seconds of the stage from one place to another, `[places, places]`; infinite where it would be empty."""
        at = self._nodes_s[self.positions]
        handed = np.array([0.0, *map(self._speed.link_seconds, self.crossing[self.positions[1:]])])
        return np.where(self._is_span, at[None, :] - at[:, None] + handed[:, None], np.inf)

    def memory(self) -> Floats:
        """Bytes of its weights and activations, likewise."""
        return np.where(self._is_span, self.weight_spans + self._activations, np.inf)

    def stage(self, a: int, b: int, seconds: float) -> StageCost:
        begin, end = int(self.positions[a]), int(self.positions[b])
        return StageCost(
            begin=begin,
            end=end,
            seconds=seconds,
            weight_bytes=int(self.weight_spans[a, b]),
            activation_bytes=int(self._activations[a, b]),
            handed_bytes=int(self.crossing[begin]) if begin else 0,
            flops=sum(node.flops for node in self._costs.nodes[begin:end]),
        )

    @property
    def _is_span(self) -> npt.NDArray[np.bool_]:
        order = np.arange(len(self.positions))
        return order[:, None] < order[None, :]

    def _weight_spans(self) -> Floats:
        """Bytes of the weights from place to place: each counts where it is read for the first time since the begin."""
        count = len(self.positions)
        block = np.searchsorted(self.positions, np.arange(len(self._costs.nodes)), side="right") - 1
        added = np.zeros((count, count))
        for size, blocks in _weight_blocks(self._costs, block):
            for here, following in zip(blocks, (*blocks[1:], count), strict=True):
                added[here, here + 1 : following + 1] += size
        spans: Floats = np.cumsum(added[::-1], axis=0)[::-1]
        return spans

    def _activation_spans(self) -> Floats:
        """Most bytes that are alive at once from place to place."""
        count = len(self.positions)
        highest = [self._alive[a:b].max() for a, b in zip(self.positions[:-1], self.positions[1:], strict=True)]
        spans = np.zeros((count, count))
        for a in range(count - 1):
            spans[a, a + 1 :] = np.maximum.accumulate(highest[a:])
        return spans


def _crossing(costs: GraphCosts) -> Floats:
    """Bytes of one sample that are computed before each position and read at or behind it, `[nodes + 1]`."""
    sizes = costs.activations
    change = np.zeros(len(costs.nodes) + 2)
    for name, (begin, end) in _lifetimes(costs).items():
        change[begin + 1] += sizes[name]
        change[end + 1] -= sizes[name]
    return np.cumsum(change)[:-1]


def _weight_blocks(costs: GraphCosts, block: npt.NDArray[np.intp]) -> Iterator[tuple[int, list[int]]]:
    """The bytes of each weight, and the blocks of nodes that read it, in order."""
    sizes: dict[str, int] = {}
    blocks: dict[str, dict[int, None]] = {}
    for position, node in enumerate(costs.nodes):
        sizes |= node.weights
        for name in node.weights:
            blocks.setdefault(name, {})[int(block[position])] = None
    yield from ((sizes[name], list(found)) for name, found in blocks.items())


def _partition(cost: Floats, crossing: Floats, stages: int) -> list[int] | None:
    """The places between which the largest cost is least; None where every split has an infinite one.

    Args:
        cost: Cost of the stage from one place to another, `[places, places]`.
        crossing: Bytes that pass at each place: of equal splits, the one with less is taken.
        stages: Number of stages.
    """
    best = cost[0].copy()
    passed = np.zeros(len(best))
    before: list[npt.NDArray[np.intp]] = []
    for _ in range(stages - 1):
        largest = np.maximum(best[:, None], cost)
        least = largest.min(axis=0)
        tie = largest <= least * (1 + _EQUAL)
        total = np.where(tie, (passed + crossing)[:, None], np.inf)
        before.append(total.argmin(axis=0))
        best, passed = least, total.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    found = [len(best) - 1]
    for chosen in reversed(before):
        found.append(int(chosen[found[-1]]))
    return [0, *reversed(found)]
