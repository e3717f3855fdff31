"""Apply a model's `parallel` setting: check it against the other settings and this machine, and plan the split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.device import Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import promised_signature
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.places import check_apart, count_copies, find_places
from graphkiln_backend.lowering.parallel.speed import find_times
from graphkiln_backend.lowering.parallel.split import Split, plan_split
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.onnx_file import read_replaced_outputs
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import has_own_cores, numa_nodes, usable_core_numbers

_AFFINITIES = "session.intra_op_thread_affinities"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Spread of one instance of a model.

    Attributes:
        numbers: The requested numbers, and those that were left open.
        places: Place of each shard of each stage, stage by stage.
        split: Its stages; None where every instance has the whole graph on one device.
        note: Warnings for readers of the plan, about cores and sizes; may be empty.
    """

    numbers: Parallelism
    places: tuple[Place, ...]
    split: Split | None = None
    note: str = ""

    def explain(self) -> str:
        """Describe the numbers, and what each device computes and holds, a line each."""
        whole = f"parallel: {self.numbers}: the whole graph on {', '.join(map(str, self.places))}"
        return "\n".join(filter(None, (self.split.explain() if self.split else whole, self.note)))

    def check_apart(self, gpus: Sequence[int]) -> None:
        """Refuse instances that would share GPUs; see `places.check_apart`.

        Raises:
            LoweringError: Two would.
        """
        if self.split and self.split.numbers.splits:
            check_apart(self.split.numbers, gpus)

    def apply(self, settings: Settings, resources: Resources) -> tuple[Settings, Resources]:
        """Add the spread to settings and resources: weights are mapped once for each NUMA node."""
        nodes, folder = numa_nodes(), resources.shared_folder
        own = {nodes.get(core, 0) for place in self.places for core in place.cores}
        if folder and len(set(nodes.values())) > 1 and len(own) == 1:
            folder /= f"node{own.pop()}"
            with suppress(OSError):  # the engine logs that nothing can be shared
                folder.mkdir(exist_ok=True)
        cuts = self.split.cuts if self.split else ()
        beside = resources.works_beside or (self.split is not None and self.split.turns > 1)
        found = replace(resources, places=self.places, cuts=cuts, shared_folder=folder, works_beside=beside)
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
    cores = usable_core_numbers()[: resources.cores]
    gpus = len(hardware.gpus()) if resources.device.is_gpu else 0
    places_of = partial(
        find_places,
        instances=resources.instances,
        instance=resources.instance,
        device=resources.device,
        cores=cores,
        gpus=gpus,
    )
    if not (numbers.splits or numbers.auto or numbers.memory_bytes):
        return Spread(numbers=numbers, places=places_of(numbers), note=_note(resources))
    _check_settings(numbers, settings, saved, resources)
    _check_outputs(version)
    copies = count_copies(numbers, resources.instances, resources.device)
    split = plan_split(
        numbers,
        cache(partial(count_costs, version.graph_path, shapes=sample_shapes(version))),
        places_of,
        devices=gpus - resources.device.index if resources.device.is_gpu else len(cores) // copies,
        largest_batch=largest_batch,
        signature=promised_signature(version),
        times=find_times(version),
        turns=resources.instances // copies,
    )
    note = "\n".join(filter(None, (_unknown_sizes(version), _uneven(split), _note(resources))))
    return Spread(numbers=split.numbers, places=split.places, split=split, note=note)


def _unknown_sizes(version: ModelVersion) -> str:
    """Warn of sizes that the plan does not know; empty where it knows all."""
    inputs = promised_signature(version).inputs
    varying = dict.fromkeys(dim for spec in inputs for dim in spec.shape[1:] if isinstance(dim, str))
    if version.golden or not varying:
        return ""
    return (
        f"sizes that vary ({', '.join(varying)}) count as 1, since there are no golden samples: costs and activations "
        "are larger (graphkiln convert FILE.onnx --samples DIR)"
    )


def _uneven(split: Split) -> str:
    """Warn of groups of cores that are not equal; empty where they are."""
    sizes = {len(place.cores) for place in split.places}
    if len(sizes) < 2:
        return ""
    return (
        f"groups of {min(sizes)} and of {max(sizes)} cores were planned as equal: the larger ones wait for the smaller "
        "(numbers that divide the cores use all of them)"
    )


def sample_shapes(version: ModelVersion) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the golden samples' inputs, with a batch of 1; empty where there are no samples."""
    golden = version.golden
    shapes = {name: array.shape for name, array in golden.inputs.items()} if golden else {}
    return shapes if golden and golden.whole else {name: (1, *shape[1:]) for name, shape in shapes.items()}


def _note(resources: Resources) -> str:
    """Warn that other servers may use the cores of the plan; empty where they cannot."""
    if resources.device.is_gpu or has_own_cores():
        return ""
    return (
        "a quota limits this server, not a set of cores: another one on this machine may take the same ones, and each "
        "has half of them then (give each cores of its own: docker run --cpuset-cpus, Kubernetes' static CPU manager)"
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
