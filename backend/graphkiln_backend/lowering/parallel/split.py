"""The plan of a model that is spread over devices: its numbers, its stages, what each device holds, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphkiln_backend.graph.device import WAITING, Device, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeTimes
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.cuts import Held, StageCost, find_stages
from graphkiln_backend.lowering.parallel.measured_speed import MeasuredSpeed
from graphkiln_backend.lowering.parallel.places import counted
from graphkiln_backend.lowering.parallel.speed import CPU_CORE, PCIE_GPU, Speed

# Into how many micro-batches a pipeline cuts a batch, where nobody says it: by the costs of its stages.
#
# More of them keep more stages at work, and each one reads all weights of a stage again and is handed over on its own.

FindStages = Callable[[int], tuple[StageCost, ...]]
"""Rows of a micro-batch -> the best stages for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """How a largest batch is cut.

    Attributes:
        count: Micro-batches.
        rows: Of each, at most.
        stages: What each stage costs for one of them.
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
        """Of a batch: the first part passes all stages, then the slowest one takes its time for each more.

        Where several batches are under way, each takes its share of that, or as long as the slowest stage needs for it.
        """
        times = [stage.seconds for stage in self.stages]
        alone = sum(times) + (self.count - 1) * max(times)
        return max(alone / self.turns, self.count * max(times))

    def explain(self, costs: str = "counted") -> str:
        """Why so many; empty where somebody said it.

        Args:
            costs: Whether they were counted or measured.
        """
        if not self.others:
            return ""
        beside = ", ".join(f"{count} take {seconds / self.seconds:.2f}x" for count, seconds in self.others.items())
        return f"the fastest by {costs} costs ({beside} of the time)"


def cut_batch(find: FindStages, largest_batch: int, counts: Sequence[int], turns: int = 1) -> Cutting:
    """The cutting by which a batch is over first; of those that are as fast, the one with the fewest parts.

    Args:
        find: Finds the stages; raises `LoweringError` where none fit.
        largest_batch: Rows.
        counts: What to choose from, ascending.
        turns: Batches that may be under way at once.

    Raises:
        LoweringError: For none of them there are stages that fit; as for the one that needs the least memory.
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
    """What is considered: powers of two, and parts of one row.

    Args:
        largest_batch: Rows, at least 1.
    """
    powers = [1 << exponent for exponent in range(largest_batch.bit_length())]
    return tuple(sorted({*powers, largest_batch}))


CountCosts = Callable[[int], GraphCosts]
"""Number of shards -> the costs of one of them."""
FindPlaces = Callable[[Parallelism], tuple[Place, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How one copy of a model is spread.

    Attributes:
        numbers: What was requested, with what was left open.
        stages: What each stage costs on one of its devices.
        places: Of each shard of each stage, stage by stage.
        rows: Samples of a micro-batch.
        whole: The costs of the whole graph.
        why: Why there are so many micro-batches; empty where it was requested.
        tried: With `auto`: why smaller numbers do not do, a line each.
        basis: Where costs come from, if they were measured.
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

    def places_of(self, stage: int) -> tuple[Place, ...]:
        """The places of the shards of a stage."""
        return self.places[stage * self.numbers.tensor : (stage + 1) * self.numbers.tensor]

    def explain(self) -> str:
        """The numbers, and what each device computes and holds, a line each."""
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
            places = ", ".join(map(str, self.places_of(number)))
            held = f"{format_size(stage.weight_bytes)} of weights ({stage.weight_bytes / total:.0%} of the model's)"
            handed = f", takes {format_size(stage.handed_bytes)} from the stage before" if stage.handed_bytes else ""
            yield (
                f"stage {number} on {places}: nodes {stage.begin}-{stage.end - 1}, {_products(stage)}, each device "
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
    """Plans how a model is spread.

    Args:
        numbers: What is requested.
        count_costs: Counts the costs of a shard.
        find_places: Finds the places of an instance.
        devices: Groups of cores, or GPUs, that one copy may use at most.
        largest_batch: The largest batch that will be requested.
        signature: Of the graph.
        times: What was measured of the graph's nodes on a core; None where costs are counted.
        turns: Instances that share the devices of a copy, each with a batch of its own.

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
            attempts=("it is not told how much a device has",),
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
    speed = _speed(places[0].device, times, count_costs)

    def find(rows: int) -> tuple[StageCost, ...]:
        held = Held(waiting=min(WAITING, math.ceil(largest_batch / rows) - 1), turns=turns)
        return find_stages(costs, numbers.pipeline, speed, rows=rows, memory_bytes=numbers.memory_bytes, held=held)

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


def _speed(device: Device, times: NodeTimes | None, count_costs: CountCosts) -> Speed:
    """Of each device: what was measured on a core says nothing of a GPU."""
    if device.is_gpu:
        return PCIE_GPU
    return MeasuredSpeed.of(CPU_CORE, times, count_costs(1)) if times else CPU_CORE


def _micro_batches(numbers: Parallelism, largest_batch: int, signature: Signature, turns: int) -> tuple[int, ...]:
    """Into how many parts a largest batch may be cut.

    Raises:
        LoweringError: A batch cannot be split, and it was not said that stages may take turns.
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
    """Why a batch cannot be split; empty where it can."""
    if largest_batch < 2:
        return "batches are of one row (max_batch_size)"
    fixed = [spec.name for spec in (*signature.inputs, *signature.outputs) if not spec.batchable]
    if fixed:
        return f"the first dimension of '{fixed[0]}' is not the batch"
    if len({spec.shape[0] for spec in signature.inputs}) > 1:
        return f"the first dimensions of {', '.join(spec.name for spec in signature.inputs)} need not be equal"
    return ""


def _products(stage: StageCost) -> str:
    return f"{stage.flops / 1e9:.3g} GFLOP a sample"
