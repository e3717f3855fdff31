"""Plan how a model is spread over devices by its `parallel` setting: numbers, places, stages, and the reasons."""

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

_AFFINITIES = "session.intra_op_thread_affinities"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices of this machine for one model.

    Attributes:
        device: Device on which Triton starts the instance.
        cores: Numbers of the usable cores, sorted so that neighbors are adjacent.
        gpus: Number of GPUs.
        instances: Number of instances of the model.
        instance: Number of this instance, from 0.
    """

    device: Device
    cores: Sequence[int]
    gpus: int = 0
    instances: int = 1
    instance: int = 0

    def copies(self, numbers: Parallelism) -> int:
        """Count the copies of the model that share no devices: one per instance, unless instances share stages.

        Raises:
            LoweringError: `data` does not match the number of instances.
        """
        shares = (numbers.pipeline > 1 or numbers.auto) and not self.device.is_gpu
        if numbers.data not in (0, self.instances) and not (shares and self.instances % numbers.data == 0):
            raise LoweringError(
                f"data={numbers.data} needs {numbers.data} instances of the model",
                attempts=(f"its configuration has {self.instances}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: {numbers.data} }} ]",
            )
        return numbers.data or self.instances

    def devices(self, numbers: Parallelism) -> int:
        """Count the GPUs or cores available to one copy."""
        return self.gpus - self.device.index if self.device.is_gpu else len(self.cores) // self.copies(numbers)

    def places(self, numbers: Parallelism) -> tuple[Place, ...]:
        """Assign a place to each shard of each stage of this instance, stage by stage.

        Cores are split into disjoint groups of neighbors of nearly equal size. On GPUs an instance uses its own GPU and
        the following ones: with `gpus: [0, 2]` and two stages, 0 and 1, 2 and 3. If there are more instances than
        copies, several instances share the cores of a copy and overlap their batches.

        Raises:
            LoweringError: There are not enough instances, cores or GPUs.
        """
        copies = self.copies(numbers)
        if self.device.is_gpu:
            return self._gpus(numbers)
        wanted = copies * numbers.devices
        if wanted > len(self.cores):
            raise LoweringError(
                f"{numbers} needs {wanted} groups of cores",
                attempts=(
                    f"{counted(copies, 'instance')} of {numbers.devices} groups; {len(self.cores)} cores available",
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
                f"{numbers} needs {numbers.devices} GPUs from {self.device} on",
                attempts=(f"available GPUs: {present}",),
                hint="choose smaller numbers, or other `gpus` of the instance_group",
            )
        return tuple(Place(Device.gpu(self.device.index + number)) for number in range(numbers.devices))


def check_apart(numbers: Parallelism, gpus: Sequence[int]) -> None:
    """Check that the GPUs of instances do not overlap, given the first GPU of each.

    Raises:
        LoweringError: Two instances would share a GPU.
    """
    for first, second in itertools.pairwise(sorted(gpus)):
        if second - first < numbers.devices:
            apart = ", ".join(str(number * numbers.devices) for number in range(len(gpus)))
            raise LoweringError(
                f"two instances of {numbers.devices} GPUs each would share {Device.gpu(second)}",
                attempts=(f"one starts at {Device.gpu(first)}, the other at {Device.gpu(second)}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {apart} ] }} ]",
            )


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 core`, `2 cores`."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Spread of one instance of a model.

    Attributes:
        numbers: Requested and chosen numbers.
        places: Place of each shard of each stage, stage by stage.
        stages: Costs of each stage on one of its devices; empty if the graph is not split.
        rows: Samples of a micro-batch.
        weight_bytes: Weights of the whole graph.
        turns: Number of instances that share the devices.
        reasons: Reasons for the numbers, a line each.
        rejected: With `auto`: reasons against smaller numbers, a line each.
        warnings: Warnings about cores and sizes, a line each.
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
        """Position of the first node of each stage except the first."""
        return tuple(stage.begin for stage in self.stages[1:])

    def explain(self) -> str:
        """Describe the numbers and the load of each device, a line each."""
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
            handed = format_size(stage.handed_bytes)
            received = f", receives {handed} from the previous stage" if stage.handed_bytes else ""
            yield (
                f"stage {number} on {', '.join(map(str, own))}: nodes {stage.begin}-{stage.end - 1}, "
                f"{stage.flops / 1e9:.3g} GFLOP a sample, each device "
                f"holds {held} and {format_size(stage.activation_bytes)} of activations{received}; "
                f"{stage.seconds / slowest:.0%} of the slowest stage's time"
            )

    def check_apart(self, gpus: Sequence[int]) -> None:
        """Check that instances share no GPUs.

        Raises:
            LoweringError: Two instances would share a GPU.
        """
        if self.numbers.splits:
            check_apart(self.numbers, gpus)

    def apply(self, settings: Settings, resources: Resources) -> tuple[Settings, Resources]:
        """Add the spread to settings and resources; weights are shared within a NUMA node only."""
        nodes, folder = numa_nodes(), resources.shared_folder
        own = {nodes.get(core, 0) for place in self.places for core in place.cores}
        if folder and len(set(nodes.values())) > 1 and len(own) == 1:
            folder /= f"node{own.pop()}"
            with suppress(OSError):  # the engine logs that weights cannot be shared
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
    """Plan the spread of a model.

    Args:
        numbers: The requested numbers.
        settings: All settings of the model.
        version: The version.
        resources: Cores and devices of the machine.
        saved: Precision of the saved graph.
        largest_batch: Largest batch that Triton will form.

    Raises:
        LoweringError: The model cannot be spread as requested, or other settings contradict it.
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
        machine: Usable devices.
        count_costs: Number of shards -> costs of one shard.
        signature: Signature of the graph.
        largest_batch: Largest batch of requests.
        times: Measured times of the graph's nodes on a core, or None to use counted costs.
    """

    machine: Machine
    count_costs: Callable[[int], GraphCosts]
    signature: Signature
    largest_batch: int
    times: NodeTimes | None = None

    def plan(self, numbers: Parallelism) -> Spread:
        """Plan the requested numbers; with `auto`, find the fewest devices that fit the memory.

        Raises:
            LoweringError: The model cannot be spread this way; `attempts` has the reasons.
        """
        if not numbers.auto:
            return self._plan(numbers)
        if not numbers.memory_bytes:
            raise LoweringError(
                "parallel: auto needs the memory of a device",
                attempts=("`memory` is missing",),
                hint="write parallel: auto, memory=2GiB",
            )
        devices, rejected = self.machine.devices(numbers), list[str]()
        # Fewest devices first; for the same number stages before shards, since they transfer less.
        splits = [(n // tensor, tensor) for n in range(1, devices + 1) for tensor in range(1, n + 1) if n % tensor == 0]
        for pipeline, tensor in splits:
            candidate = numbers.of(pipeline, tensor)
            if pipeline > 1 and not candidate.micro_batches and why_whole(self.largest_batch, self.signature):
                candidate = replace(candidate, micro_batches=1)  # stages take turns
            try:
                return replace(self._plan(candidate), rejected=tuple(rejected))
            except LoweringError as error:
                rejected.append(f"pipeline={pipeline}, tensor={tensor}: {error.message}")
        raise LoweringError(
            f"{numbers}: the model does not fit",
            attempts=tuple(rejected),
            hint=f"{counted(devices, 'device')} available: use more `memory`, or more devices",
        )

    def _plan(self, numbers: Parallelism) -> Spread:
        """Choose the number of micro-batches with the shortest time of a largest batch; the fewest of equal ones.

        More micro-batches keep more stages busy, but each one reads all weights of a stage again.
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
                refused = error  # the last one is for the smallest parts, which need the least memory
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
            reasons.append(f"{turns} instances share these devices and overlap their batches")
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
            return PCIE_GPU  # times measured on a core do not apply
        return MeasuredSpeed.of(CPU_CORE, self.times, self.count_costs(1)) if self.times else CPU_CORE

    def _counts_of_micro_batches(self, numbers: Parallelism, turns: int) -> tuple[int, ...]:
        """Return the numbers of micro-batches to try: powers of two, and micro-batches of one row.

        Raises:
            LoweringError: A batch cannot be split, and the user did not allow stages to take turns.
        """
        if numbers.pipeline == 1 or numbers.micro_batches == 1:
            return (1,)
        if reason := why_whole(self.largest_batch, self.signature):
            if turns > 1 and not numbers.micro_batches:
                return (1,)  # the batches of several instances keep the stages busy
            raise LoweringError(
                f"{numbers} would compute parts of a batch in parallel",
                attempts=(reason,),
                hint="micro_batches=1 lets the stages take turns, which saves memory on each device but is not faster; "
                f"on cores, data=1 with {numbers.pipeline} instances keeps all stages busy",
            )
        if numbers.micro_batches:
            return (min(numbers.micro_batches, self.largest_batch),)
        powers = [1 << exponent for exponent in range(self.largest_batch.bit_length())]
        return tuple(sorted({*powers, self.largest_batch}))


def batch_seconds(stages: Sequence[float], micro_batches: int, turns: int = 1) -> float:
    """Estimate the seconds of a batch from the seconds of each stage for one micro-batch.

    The first micro-batch passes all stages, then the slowest stage determines the time of each further one. With
    several batches in flight, each takes its share of that, but at least the time of the slowest stage.
    """
    alone = sum(stages) + (micro_batches - 1) * max(stages)
    return max(alone / turns, micro_batches * max(stages))


def why_whole(largest_batch: int, signature: Signature) -> str:
    """Return the reason why a batch cannot be split, or empty."""
    if largest_batch < 2:
        return "batches are of one row (max_batch_size)"
    fixed = [spec.name for spec in (*signature.inputs, *signature.outputs) if not spec.batchable]
    if fixed:
        return f"the first dimension of '{fixed[0]}' is not the batch"
    if len({spec.shape[0] for spec in signature.inputs}) > 1:
        return f"the first dimensions of {', '.join(spec.name for spec in signature.inputs)} need not be equal"
    return ""


def _unknown_sizes(version: ModelVersion) -> Iterator[str]:
    """Warn about dynamic sizes that the plan does not know."""
    inputs = promised_signature(version).inputs
    varying = dict.fromkeys(dim for spec in inputs for dim in spec.shape[1:] if isinstance(dim, str))
    if varying and not version.golden:
        yield (
            f"dynamic sizes ({', '.join(varying)}) count as 1, since there are no golden samples: actual costs and "
            "activations are larger (graphkiln convert FILE.onnx --samples DIR)"
        )


def _uneven(spread: Spread) -> Iterator[str]:
    """Warn about groups of cores of different size."""
    sizes = {len(place.cores) for place in spread.places}
    if len(sizes) > 1:
        yield (
            f"groups of {min(sizes)} and of {max(sizes)} cores were planned as equal: the larger ones wait for the "
            "smaller ones (choose numbers that divide the number of cores)"
        )


def sample_shapes(version: ModelVersion) -> dict[str, tuple[int, ...]]:
    """Return the input shapes of a golden sample, with a batch of 1; empty if there are none."""
    golden = version.golden
    shapes = {name: array.shape for name, array in golden.inputs.items()} if golden else {}
    return shapes if golden and golden.whole else {name: (1, *shape[1:]) for name, shape in shapes.items()}


def _shared_cores(resources: Resources) -> Iterator[str]:
    """Warn that other servers may use the same cores."""
    if not (resources.device.is_gpu or has_own_cores()):
        yield (
            "this server is limited by a CPU quota, not to a set of cores: another server on this machine may pin its "
            "threads to the same cores (separate them: docker run --cpuset-cpus, Kubernetes' static CPU manager)"
        )


def _check_settings(numbers: Parallelism, settings: Settings, saved: Precision, resources: Resources) -> None:
    """Refuse settings that contradict stages or shards."""
    contradictions: Sequence[tuple[bool, str, str]] = (
        (
            settings.streams > 1,
            f"streams={settings.streams} splits a batch as well",
            "leave `streams` out",
        ),
        (
            settings.precision not in (None, saved),
            f"the graph was saved in {saved}, and a split graph runs as saved, not in {settings.precision}",
            f"convert the source model again with --precision {settings.precision}, or leave `precision` out",
        ),
        (
            saved is Precision.BF16 and not resources.device.is_gpu and (numbers.splits or numbers.auto),
            "the graph was saved in bf16, which only OpenVINO computes on CPUs, and OpenVINO graphs cannot be split",
            "convert the source model again without --precision bf16, or leave `parallel` out",
        ),
        (
            _AFFINITIES in settings.tuning.config_entries,
            f"{_AFFINITIES} pins the same threads as `parallel`",
            f"leave {_AFFINITIES} out",
        ),
    )
    for contradicts, reason, hint in contradictions:
        if contradicts:
            raise LoweringError(f"parallel: {numbers}", attempts=(reason,), hint=hint)


def _check_outputs(version: ModelVersion) -> None:
    """Refuse graphs that are served without some outputs of the file."""
    if version.manifest is None and (replaced := read_replaced_outputs(version.graph_path)):
        raise LoweringError(
            "the graph cannot be split",
            attempts=(str(replaced[0]),),
            hint="convert it (graphkiln convert FILE.onnx), or leave `parallel` out",
        )
