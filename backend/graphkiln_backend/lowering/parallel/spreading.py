"""Spread a model over devices, as its `parallel` setting requests: numbers, places, stages, and why not otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.device import WAITING, Device, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeTimes
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import promised_signature
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import CPU_CORE, PCIE_GPU, MeasuredSpeed, Speed, find_times
from graphkiln_backend.lowering.parallel.stages import StageCost, find_stages
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.onnx_file import read_replaced_outputs
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import has_own_cores, numa_nodes, usable_core_numbers

# Places of the stages and shards of an instance: groups of cores, or GPUs.


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices of this machine for one model.

    Attributes:
        device: Device on which Triton starts the instance.
        cores: Numbers of all cores that the model may use, neighbors behind each other.
        gpus: Number of GPUs.
        instances: Number of instances of the model.
        instance: Number of this one, from 0.
    """

    device: Device
    cores: Sequence[int]
    gpus: int = 0
    instances: int = 1
    instance: int = 0

    def copies(self, numbers: Parallelism) -> int:
        """Count the copies that share no devices: as many as there are instances, unless stages are shared.

        Raises:
            LoweringError: There are not that many instances.
        """
        shares = (numbers.pipeline > 1 or numbers.auto) and not self.device.is_gpu
        if numbers.data not in (0, self.instances) and not (shares and self.instances % numbers.data == 0):
            raise LoweringError(
                f"data={numbers.data} asks for as many instances of the model",
                attempts=(f"its configuration has {self.instances}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: {numbers.data} }} ]",
            )
        return numbers.data or self.instances

    def devices(self, numbers: Parallelism) -> int:
        """Count the GPUs, or groups of cores, that one copy may use at most."""
        return self.gpus - self.device.index if self.device.is_gpu else len(self.cores) // self.copies(numbers)

    def places(self, numbers: Parallelism) -> tuple[Place, ...]:
        """Find the places of the instance: stage by stage, within a stage shard by shard.

        The cores are cut into groups of neighbors, as equal as they can be, which no two places share. On GPUs an
        instance takes those behind its own: with `gpus: [0, 2]` and two stages, 0 and 1, 2 and 3. Where there are more
        instances than copies, several share the cores of a copy: while a batch of one ends, one of another begins.

        Raises:
            LoweringError: There are not that many instances, cores or GPUs.
        """
        copies = self.copies(numbers)
        if self.device.is_gpu:
            return self._gpus(numbers)
        wanted = copies * numbers.devices
        if wanted > len(self.cores):
            raise LoweringError(
                f"{numbers} asks for {wanted} groups of cores",
                attempts=(
                    f"{counted(copies, 'instance')} of {numbers.devices} each, and {len(self.cores)} cores are here",
                ),
                hint="choose smaller numbers, or fewer instances (instance_group)",
            )
        size, more = divmod(len(self.cores), wanted)  # the first groups have one core more
        ends = [size * number + min(number, more) for number in range(wanted + 1)]
        groups = [Place(self.device, tuple(self.cores[begin:end])) for begin, end in itertools.pairwise(ends)]
        first = (self.instance % copies) * numbers.devices
        return tuple(groups[first : first + numbers.devices])

    def _gpus(self, numbers: Parallelism) -> tuple[Place, ...]:
        if self.device.index + numbers.devices > self.gpus:
            present = ", ".join(str(Device.gpu(index)) for index in range(self.gpus)) or "none"
            raise LoweringError(
                f"{numbers} asks for {numbers.devices} GPUs from {self.device} on",
                attempts=(f"GPUs that are here: {present}",),
                hint="choose smaller numbers, or other `gpus` of the instance_group",
            )
        return tuple(Place(Device.gpu(self.device.index + number)) for number in range(numbers.devices))


def check_apart(numbers: Parallelism, gpus: Sequence[int]) -> None:
    """Refuse instances, by the first GPU of each, of which one would begin on a GPU of another one.

    Raises:
        LoweringError: Two instances would share a GPU.
    """
    for first, second in itertools.pairwise(sorted(gpus)):
        if second - first < numbers.devices:
            apart = ", ".join(str(number * numbers.devices) for number in range(len(gpus)))
            raise LoweringError(
                f"two instances of {numbers.devices} GPUs each would share {Device.gpu(second)}",
                attempts=(f"one begins on {Device.gpu(first)}, the other on {Device.gpu(second)}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {apart} ] }} ]",
            )


def counted(count: int, noun: str) -> str:
    """Spell out a number: `1 core`, `2 cores`."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


_AFFINITIES = "session.intra_op_thread_affinities"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Spread of one instance of a model.

    Attributes:
        numbers: The requested numbers, and those that were left open.
        places: Place of each shard of each stage, stage by stage.
        stages: Costs of each stage on one of its devices; empty where every instance has the whole graph on one device.
        rows: Samples of a micro-batch.
        weight_bytes: Weights of the whole graph.
        turns: Instances that share the devices.
        reasons: Reasons for the numbers, a line each.
        rejected: With `auto`: reasons against smaller numbers, a line each.
        warnings: About cores and sizes, a line each.
    """

    numbers: Parallelism
    places: tuple[Place, ...]
    stages: tuple[StageCost, ...] = ()
    rows: int = 0
    weight_bytes: int = 0
    turns: int = 1
    reasons: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Positions of the first node of each stage but the first."""
        return tuple(stage.begin for stage in self.stages[1:])

    def explain(self) -> str:
        """Describe the numbers, and what each device computes and holds, a line each."""
        whole = "" if self.stages else f": the whole graph on {', '.join(map(str, self.places))}"
        rejected = (f"rejected: {line}" for line in self.rejected)
        lines = (f"parallel: {self.numbers}{whole}", *self.reasons, *self._stage_lines(), *rejected, *self.warnings)
        return "\n".join(lines)

    def _stage_lines(self) -> Iterator[str]:
        slowest = max((stage.seconds for stage in self.stages), default=0.0) or 1.0
        total = max(1, self.weight_bytes)
        for number, stage in enumerate(self.stages):
            own = self.places[number * self.numbers.tensor : (number + 1) * self.numbers.tensor]
            held = f"{format_size(stage.weight_bytes)} of weights ({stage.weight_bytes / total:.0%} of the model's)"
            handed = f", takes {format_size(stage.handed_bytes)} from the stage before" if stage.handed_bytes else ""
            yield (
                f"stage {number} on {', '.join(map(str, own))}: nodes {stage.begin}-{stage.end - 1}, "
                f"{stage.flops / 1e9:.3g} GFLOP a sample, each device "
                f"holds {held} and {format_size(stage.activation_bytes)} of activations{handed}; "
                f"{stage.seconds / slowest:.0%} of the slowest stage's time"
            )

    def check_apart(self, gpus: Sequence[int]) -> None:
        """Refuse instances that would share GPUs; see `check_apart`.

        Raises:
            LoweringError: Two would.
        """
        if self.numbers.splits:
            check_apart(self.numbers, gpus)

    def apply(self, settings: Settings, resources: Resources) -> tuple[Settings, Resources]:
        """Add the spread to settings and resources: weights are mapped once for each NUMA node."""
        nodes, folder = numa_nodes(), resources.shared_folder
        own = {nodes.get(core, 0) for place in self.places for core in place.cores}
        if folder and len(set(nodes.values())) > 1 and len(own) == 1:
            folder /= f"node{own.pop()}"
            with suppress(OSError):  # the engine logs that nothing can be shared
                folder.mkdir(exist_ok=True)
        beside = resources.works_beside or self.turns > 1
        found = replace(resources, places=self.places, cuts=self.cuts, shared_folder=folder, works_beside=beside)
        return replace(settings, parallel=self.numbers), found


def spread_model(
    numbers: Parallelism,
    settings: Settings,
    version: ModelVersion,
    resources: Resources,
    *,
    saved: Precision,
    largest_batch: int,
) -> Spread:
    """Plan how a model is spread.

    Args:
        numbers: The requested numbers.
        settings: The other settings of the model.
        version: The version.
        resources: Cores and devices of the machine.
        saved: Precision that the graph was saved in.
        largest_batch: The largest batch that Triton will form.

    Raises:
        LoweringError: It cannot be spread as requested, or other settings contradict it.
    """
    machine = Machine(
        device=resources.device,
        cores=usable_core_numbers()[: resources.cores],
        gpus=len(hardware.gpus()) if resources.device.is_gpu else 0,
        instances=resources.instances,
        instance=resources.instance,
    )
    if not (numbers.splits or numbers.auto or numbers.memory_bytes):
        return Spread(numbers=numbers, places=machine.places(numbers), warnings=tuple(_shared_cores(resources)))
    _check_settings(numbers, settings, saved, resources)
    _check_outputs(version)
    planner = Planner(
        machine=machine,
        count_costs=cache(partial(count_costs, version.graph_path, shapes=sample_shapes(version))),
        signature=promised_signature(version),
        largest_batch=largest_batch,
        times=find_times(version),
    )
    spread = planner.plan(numbers)
    warnings = (*_unknown_sizes(version), *_uneven(spread), *_shared_cores(resources))
    return replace(spread, warnings=warnings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Planner of the stages and shards of a model.

    Attributes:
        machine: Devices that may be used.
        count_costs: Number of shards -> costs of one of them.
        signature: Signature of the graph.
        largest_batch: The largest batch that will be requested.
        times: Measured times of the graph's nodes on a core; None where costs are counted.
    """

    machine: Machine
    count_costs: Callable[[int], GraphCosts]
    signature: Signature
    largest_batch: int
    times: NodeTimes | None = None

    def plan(self, numbers: Parallelism) -> Spread:
        """Plan the requested numbers; with `auto`, the fewest devices that fit the memory.

        Raises:
            LoweringError: The model cannot be spread so; `attempts` says why.
        """
        if not numbers.auto:
            return self._plan(numbers)
        if not numbers.memory_bytes:
            raise LoweringError(
                "parallel: auto fits a model into memory",
                attempts=("the memory of a device is not given",),
                hint="write parallel: auto, memory=2GiB",
            )
        devices, rejected = self.machine.devices(numbers), list[str]()
        # The fewest devices first; of as many, stages before shards, which send less.
        splits = [(n // tensor, tensor) for n in range(1, devices + 1) for tensor in range(1, n + 1) if n % tensor == 0]
        for pipeline, tensor in splits:
            candidate = numbers.of(pipeline, tensor)
            if pipeline > 1 and not candidate.micro_batches and why_whole(self.largest_batch, self.signature):
                candidate = replace(candidate, micro_batches=1)  # who asks for memory alone gets stages in turn
            try:
                return replace(self._plan(candidate), rejected=tuple(rejected))
            except LoweringError as error:
                rejected.append(f"pipeline={pipeline}, tensor={tensor}: {error.message}")
        raise LoweringError(
            f"{numbers}: no numbers fit",
            attempts=tuple(rejected),
            hint=f"{counted(devices, 'device')} can be used: give them more `memory`, or more devices",
        )

    def _plan(self, numbers: Parallelism) -> Spread:
        """Cut the largest batch so that it is over first; of cuts that are as fast, take the one with fewest parts.

        More micro-batches keep more stages at work, and each one reads all weights of a stage again.
        """
        places = self.machine.places(numbers)
        turns = self.machine.instances // self.machine.copies(numbers)
        counts = self._counts_of_micro_batches(numbers, turns)
        costs, speed = self.count_costs(numbers.tensor), self._speed()
        found: dict[int, tuple[StageCost, ...]] = {}
        refused: LoweringError | None = None
        for count in counts:
            rows = math.ceil(self.largest_batch / count)
            try:
                found[count] = find_stages(
                    costs,
                    numbers.pipeline,
                    speed,
                    rows=rows,
                    memory_bytes=numbers.memory_bytes,
                    waiting=min(WAITING, math.ceil(self.largest_batch / rows) - 1),
                    turns=turns,
                )
            except LoweringError as error:
                refused = error  # the last one is of the parts that need the least memory
        if refused and not found:
            raise refused
        seconds = {count: batch_seconds([s.seconds for s in stages], count, turns) for count, stages in found.items()}
        chosen = min(seconds, key=lambda count: seconds[count])
        rows = math.ceil(self.largest_batch / chosen)
        reasons = []
        if numbers.pipeline > 1:
            others = [f"{count} take {seconds[count] / seconds[chosen]:.2f}x" for count in seconds if count != chosen]
            basis = "measured" if isinstance(speed, MeasuredSpeed) else "counted"
            why = f": the fastest by {basis} costs ({', '.join(others)} of the time)" if others else ""
            reasons.append(f"micro-batches of {counted(rows, 'row')}, {chosen} of a largest batch{why}")
        if turns > 1:
            reasons.append(f"{turns} instances share these devices: while a batch of one ends, one of another begins")
        if isinstance(speed, MeasuredSpeed):
            reasons.append(speed.explain())
        return Spread(
            numbers=replace(numbers, micro_batches=chosen if numbers.pipeline > 1 else 0),
            places=places,
            stages=found[chosen],
            rows=rows,
            weight_bytes=self.count_costs(1).weight_bytes,
            turns=turns,
            reasons=tuple(reasons),
        )

    def _speed(self) -> Speed:
        if self.machine.device.is_gpu:
            return PCIE_GPU  # times that were measured on a core say nothing of it
        return MeasuredSpeed.of(CPU_CORE, self.times, self.count_costs(1)) if self.times else CPU_CORE

    def _counts_of_micro_batches(self, numbers: Parallelism, turns: int) -> tuple[int, ...]:
        """Numbers of parts into which a largest batch may be cut: powers of two, and parts of one row.

        Raises:
            LoweringError: A batch cannot be split, and stages may not take turns.
        """
        if numbers.pipeline == 1 or numbers.micro_batches == 1:
            return (1,)
        if reason := why_whole(self.largest_batch, self.signature):
            if turns > 1 and not numbers.micro_batches:
                return (1,)  # the stages work on the batches of several instances
            raise LoweringError(
                f"{numbers} would compute parts of a batch side by side",
                attempts=(reason,),
                hint="micro_batches=1 lets the stages take turns: less memory on each device, and no more speed; on "
                f"cores, data=1 with {numbers.pipeline} instances keeps all of them at work",
            )
        if numbers.micro_batches:
            return (min(numbers.micro_batches, self.largest_batch),)
        powers = [1 << exponent for exponent in range(self.largest_batch.bit_length())]
        return tuple(sorted({*powers, self.largest_batch}))


def batch_seconds(stages: Sequence[float], micro_batches: int, turns: int = 1) -> float:
    """Return the time of a batch by the seconds that each stage takes for a micro-batch.

    The first micro-batch passes all stages, then the slowest stage takes its time for each more. Where several batches
    are under way, in turn, each takes its share of that, or as long as the slowest stage needs for it.
    """
    alone = sum(stages) + (micro_batches - 1) * max(stages)
    return max(alone / turns, micro_batches * max(stages))


def why_whole(largest_batch: int, signature: Signature) -> str:
    """Return the reason why a batch cannot be split; empty where it can."""
    if largest_batch < 2:
        return "batches are of one row (max_batch_size)"
    fixed = [spec.name for spec in (*signature.inputs, *signature.outputs) if not spec.batchable]
    if fixed:
        return f"the first dimension of '{fixed[0]}' is not the batch"
    if len({spec.shape[0] for spec in signature.inputs}) > 1:
        return f"the first dimensions of {', '.join(spec.name for spec in signature.inputs)} need not be equal"
    return ""


def _unknown_sizes(version: ModelVersion) -> Iterator[str]:
    """Warn of sizes that the plan does not know."""
    inputs = promised_signature(version).inputs
    varying = dict.fromkeys(dim for spec in inputs for dim in spec.shape[1:] if isinstance(dim, str))
    if varying and not version.golden:
        yield (
            f"sizes that vary ({', '.join(varying)}) count as 1, since there are no golden samples: costs and "
            "activations are larger (graphkiln convert FILE.onnx --samples DIR)"
        )


def _uneven(spread: Spread) -> Iterator[str]:
    """Warn of groups of cores that are not equal."""
    sizes = {len(place.cores) for place in spread.places}
    if len(sizes) > 1:
        yield (
            f"groups of {min(sizes)} and of {max(sizes)} cores were planned as equal: the larger ones wait for the "
            "smaller (numbers that divide the cores use all of them)"
        )


def sample_shapes(version: ModelVersion) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the golden samples' inputs, with a batch of 1; empty where there are no samples."""
    golden = version.golden
    shapes = {name: array.shape for name, array in golden.inputs.items()} if golden else {}
    return shapes if golden and golden.whole else {name: (1, *shape[1:]) for name, shape in shapes.items()}


def _shared_cores(resources: Resources) -> Iterator[str]:
    """Warn that other servers may use the cores of the plan."""
    if not (resources.device.is_gpu or has_own_cores()):
        yield (
            "a quota limits this server, not a set of cores: another one on this machine may take the same ones, and "
            "each has half of them then (separate them: docker run --cpuset-cpus, Kubernetes' static CPU manager)"
        )


def _check_settings(numbers: Parallelism, settings: Settings, saved: Precision, resources: Resources) -> None:
    """Refuse settings that contradict stages or shards."""
    contradictions: Sequence[tuple[bool, str, str]] = (
        (
            settings.streams > 1,
            f"streams={settings.streams} cuts a batch up as well",
            "leave `streams` out",
        ),
        (
            settings.precision not in (None, saved),
            f"the graph was saved in {saved}, and a split graph runs as it was saved, not in {settings.precision}",
            f"convert the source model again with --precision {settings.precision}, or leave `precision` out",
        ),
        (
            saved is Precision.BF16 and not resources.device.is_gpu and (numbers.splits or numbers.auto),
            "the graph was saved in bf16, which OpenVINO alone computes on CPUs, and OpenVINO is not split",
            "convert the source model again without --precision bf16, or leave `parallel` out",
        ),
        (
            _AFFINITIES in settings.tuning.config_entries,
            f"{_AFFINITIES} pins threads that `parallel` pins",
            f"leave {_AFFINITIES} out",
        ),
    )
    for contradicts, reason, hint in contradictions:
        if contradicts:
            raise LoweringError(f"parallel: {numbers}", attempts=(reason,), hint=hint)


def _check_outputs(version: ModelVersion) -> None:
    """Refuse graphs that are served with other outputs than the file has."""
    if version.manifest is None and (replaced := read_replaced_outputs(version.graph_path)):
        raise LoweringError(
            "the graph cannot be split",
            attempts=(str(replaced[0]),),
            hint="convert it (graphkiln convert FILE.onnx), or leave `parallel` out",
        )
