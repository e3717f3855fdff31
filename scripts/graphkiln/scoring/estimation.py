"""`--dry-run`: what there is to do, and how long it would take, from rows that are really scored here.

Nothing is written to the destination, and no Ray is started; a cluster that is named is asked for its nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from graphkiln.scoring.extra import check_extra

if TYPE_CHECKING:
    from graphkiln.scoring.options import ScoreOptions
    from graphkiln.scoring.sampling import Rate
    from graphkiln_backend.scoring.request import ScoreRequest
    from graphkiln_backend.scoring.units import Unit

_MOST_KEPT = 10  # units that are remembered to be measured; which ones is decided by their ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers that would be started.

    Attributes:
        here: How many a machine like this one has room for.
    """

    by_node: Mapping[str, int]
    cores: int
    here: int

    @property
    def total(self) -> int:
        """On all nodes."""
        return sum(self.by_node.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The work of a run.

    Attributes:
        units: Units of the input.
        rows: Rows of the input.
        size_bytes: Bytes of the input, where that is known; else 0.
        units_before: Units that have a result.
        rows_before: Rows that have an answer.
        stale: Units with a result that are not of this plan.
    """

    units: int = 0
    rows: int = 0
    size_bytes: int = 0
    units_before: int = 0
    rows_before: int = 0
    stale: int = 0

    @property
    def rows_left(self) -> int:
        """Rows without an answer."""
        return self.rows - self.rows_before


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The estimate of a run.

    Attributes:
        configuration: Digest of all that changes an answer.
        model: Name and version.
        session: Engine, device and precision on this machine.
        planned: What there is to do.
        workers: That would be started.
        rate: Rate of a worker on this machine; None where nothing is left.
        start_s: Until a worker of this machine is ready.
        seconds: Until the end, start included, where all workers are like this one.
        seconds_interval: With 95% confidence; None where it is not known.
    """

    configuration: str
    model: str
    session: str
    planned: Planned
    workers: Workers
    rate: Rate | None = None
    start_s: float = 0.0
    seconds: float = 0.0
    seconds_interval: tuple[float, float] | None = field(default=None)


def estimate(source: str | Path, *, model: str | Path, out: str | Path, **options: Unpack[ScoreOptions]) -> Estimate:
    """Estimate a run without running it; the arguments are those of `score`.

    Raises:
        GraphkilnError: A mistake in the request.
    """
    check_extra()
    from graphkiln.scoring.options import build_request

    return estimate_request(build_request(source, model, out, options))


def estimate_request(request: ScoreRequest, tell: Callable[[str], None] = lambda _: None) -> Estimate:
    """Estimate the run of a request.

    Args:
        request: The run.
        tell: Called with what is done next, which takes its time.

    Raises:
        GraphkilnError: A mistake in the request, or no cluster answers.
    """
    from graphkiln.scoring import sampling
    from graphkiln.scoring.mistakes import check_places, check_source

    check_places(request)
    check_source(request)
    placed: list[Workers] = []

    def place(on_gpu: bool) -> int:
        placed.append(_plan_workers(request, on_gpu=on_gpu))
        return placed[0].cores

    tell("preparing the model")
    with sampling.Sampler(request, place) as sampler:
        tell("listing the source")
        planned, units = plan_units(request, sampler.configuration)
        rate = None
        if units:
            tell(f"scoring rows of the source for about {sampling.MEASURED_S:.0f} s")
            rate = sampler.measure(units)
    (workers,) = placed
    seconds, interval = _foresee(planned.rows_left, rate, workers.total, sampler.start_s)
    return Estimate(
        configuration=sampler.configuration,
        model=sampler.model,
        session=sampler.session,
        planned=planned,
        workers=workers,
        rate=rate,
        start_s=sampler.start_s,
        seconds=seconds,
        seconds_interval=interval,
    )


def plan_units(request: ScoreRequest, configuration: str) -> tuple[Planned, list[Unit]]:
    """List source and destination.

    Args:
        request: The run.
        configuration: Digest of all that changes an answer.

    Returns:
        What there is to do, and some of the units that are left.

    Raises:
        ScoringError: One of them cannot be listed.
    """
    from graphkiln_backend.scoring.opening import open_source
    from graphkiln_backend.scoring.plan import PLAN, read_plan, write_plan
    from graphkiln_backend.scoring.scratch import Scratch, scratch_folder

    with scratch_folder(Scratch.PLAN) as folder:
        plan = folder.path / PLAN
        totals = write_plan(plan, open_source(request).ranges(request.rows_per_unit), configuration)
        committed = _committed(request)
        before, rows_before, kept = 0, 0, list["Unit"]()
        for unit in read_plan(plan):
            if unit.id in committed:
                before, rows_before = before + 1, rows_before + unit.rows
            else:
                kept = _keep(kept, unit)
    planned = Planned(
        units=totals.units,
        rows=totals.rows,
        size_bytes=totals.size_bytes,
        units_before=before,
        rows_before=rows_before,
        stale=len(committed) - before,
    )
    return planned, kept


def _committed(request: ScoreRequest) -> set[str]:
    """Units that have a result; none where the destination is not there yet."""
    from graphkiln_backend.scoring.opening import open_destination

    if "://" not in request.destination and not Path(request.destination).exists():
        return set()
    return set(open_destination(request).committed_ids())


def _keep(kept: list[Unit], unit: Unit) -> list[Unit]:
    """The units of the smallest ids: digests, so that they are spread over the source."""
    if len(kept) < _MOST_KEPT or unit.id < kept[-1].id:
        return sorted([*kept, unit], key=lambda each: each.id)[:_MOST_KEPT]
    return kept


def _plan_workers(request: ScoreRequest, *, on_gpu: bool) -> Workers:
    """Place workers as the driver does."""
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.scoring.cluster import Node, connect, living_nodes, room_of
    from graphkiln_backend.system.resources import usable_cores

    this = Node(id="", name=socket.gethostname(), cores=usable_cores(), gpus=len(gpus()))
    nodes: Iterable[Node] = [this]
    if request.address:
        with connect(request.address):
            nodes = living_nodes()
    here = room_of(this, request.cores_per_worker, on_gpu=on_gpu)
    by_node: dict[str, int] = {}
    left = request.workers or None
    for node in nodes:
        room = room_of(node, request.cores_per_worker, on_gpu=on_gpu).workers
        by_node[node.name] = room if left is None else min(room, left)
        left = left if left is None else left - by_node[node.name]
    return Workers(
        by_node={name: count for name, count in by_node.items() if count}, cores=here.cores, here=here.workers
    )


def _foresee(rows: int, rate: Rate | None, workers: int, start_s: float) -> tuple[float, tuple[float, float] | None]:
    """Seconds until the end, and their interval."""
    if rate is None or not workers:
        return 0.0, None
    seconds = start_s + rows / (rate.per_s * workers)
    if rate.interval is None or rate.interval[0] <= 0:
        return seconds, None
    slow, fast = rate.interval
    return seconds, (start_s + rows / (fast * workers), start_s + rows / (slow * workers))
