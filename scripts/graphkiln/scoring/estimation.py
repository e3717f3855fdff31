"""`--dry-run`: plan a run and estimate its duration from rows that are scored on this machine.

Nothing is written to the destination, and no worker is started; a cluster that is named is only asked for its nodes.
"""

from __future__ import annotations

import heapq
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Unpack

from graphkiln.scoring.options import (
    ScoreOptions,
    build_request,
    check_places,
    check_source,
    destination_exists,
    with_pinned_snapshot,
)
from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.scoring.fleet import Node, room_of
from graphkiln_backend.scoring.messages import ScoreRequest, Unit
from graphkiln_backend.scoring.model import describe_session, read_model, with_local_model
from graphkiln_backend.scoring.plan import (
    PLAN,
    open_destination,
    open_source,
    read_plan,
    read_resume_state,
    write_plan,
)
from graphkiln_backend.scoring.scorer import Scorer
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.system.resources import usable_cores

MEASURED_S = 10.0
_SAMPLE_UNITS = 10
_MAX_PIECES = 10
_WARM_UP_ROWS = 64  # not counted; their time determines the size of the pieces
# Quantiles of Student's t-distribution, two-sided 95%, for 1 to 9 degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Workers that the run would start.

    Attributes:
        by_node: Number of workers by node.
        cores: Cores of each worker.
        here: Number of workers that fit on this machine.
    """

    by_node: Mapping[str, int]
    cores: int
    here: int

    @property
    def total(self) -> int:
        """Number of workers on all nodes."""
        return sum(self.by_node.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Work of the run.

    Attributes:
        size_bytes: Bytes of the input, or 0 if unknown.
        units_before: Units with a result.
        rows_before: Rows of those units.
        stale: Units with a result that are not planned.
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
class Rate:
    """Measured rate of one worker.

    Attributes:
        rows: Rows that were measured.
        errors: Rows of those with an error.
        pieces: Number of pieces, distributed over the source.
        per_s: Rows per second.
        interval: 95% confidence interval; None for a single piece.
    """

    rows: int
    errors: int
    pieces: int
    per_s: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimate of a run.

    Attributes:
        configuration: Digest of everything that changes an answer.
        model: Name and version.
        session: Engine, device and precision on this machine.
        rate: Rate of a worker on this machine; None if no rows are left.
        start_s: Start-up time of a worker on this machine.
        seconds: Duration including the start-up, if all workers are like this machine.
        seconds_interval: 95% confidence interval, if known.
    """

    configuration: str
    model: str
    session: str
    planned: Planned
    workers: Workers
    rate: Rate | None = None
    start_s: float = 0.0
    seconds: float = 0.0
    seconds_interval: tuple[float, float] | None = None


def estimate(source: str | Path, *, model: str | Path, out: str | Path, **options: Unpack[ScoreOptions]) -> Estimate:
    """Estimate a run without running it; takes the arguments of `score`.

    Raises:
        GraphkilnError: The request is invalid.
    """
    return estimate_request(build_request(source, model, out, options))


def estimate_request(request: ScoreRequest, report: Callable[[str], None] = lambda _: None) -> Estimate:
    """Estimate the run of a request.

    Args:
        request: The run.
        report: Called with a description of each slow step before it starts.

    Raises:
        GraphkilnError: The request is invalid, or the cluster cannot be reached.
    """
    check_places(request)
    request = with_pinned_snapshot(request)
    check_source(request)
    report("preparing the model")
    begun = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Scratch.SAMPLE)).path
        cache = stack.enter_context(CacheSettings(folder=request.cache).checked().open(folder / "cache"))
        local = with_local_model(request, folder)
        model = read_model(local, cache, usable_cores())
        workers = plan_workers(request, on_gpu=model.wants_gpu)
        if workers.cores != usable_cores():
            model = read_model(local, cache, workers.cores)
        proven = model.deployment.build(cache)
        stack.enter_context(proven.session)
        scorer = stack.enter_context(model.scorer(proven, request, workers.cores, cache))
        start_s, configuration = time.monotonic() - begun, model.configuration(request)
        report("listing the source")
        planned, units = plan_units(request, configuration)
        rate = None
        if units:
            report(f"scoring rows of the source for about {MEASURED_S:.0f} s")
            rate = measure_rate(request, scorer, units, MEASURED_S)
    seconds, interval = _predict(planned.rows_left, rate, workers.total, start_s)
    return Estimate(
        configuration=configuration,
        model=f"{model.name} version {model.version}",
        session=describe_session(proven),
        planned=planned,
        workers=workers,
        rate=rate,
        start_s=start_s,
        seconds=seconds,
        seconds_interval=interval,
    )


def plan_workers(request: ScoreRequest, *, on_gpu: bool) -> Workers:
    """Place workers as the run would."""
    this = Node(id="", name=socket.gethostname(), cores=usable_cores(), gpus=len(gpus()))
    nodes: Iterable[Node] = [this]
    if request.address:
        from graphkiln_backend.scoring.ray_cluster import connect  # imports Ray

        with connect(request.address) as cluster:
            nodes = cluster.nodes()
    by_node: dict[str, int] = {}
    left = request.workers or math.inf
    for node in nodes:
        count = int(min(room_of(node, request.cores_per_worker, on_gpu=on_gpu).workers, left))
        left -= count
        if count:
            by_node[node.name] = count
    here = room_of(this, request.cores_per_worker, on_gpu=on_gpu)
    return Workers(by_node=by_node, cores=here.cores, here=here.workers)


def plan_units(request: ScoreRequest, configuration: str) -> tuple[Planned, list[Unit]]:
    """List the source and the destination.

    Returns:
        The work of the run, and a sample of the units that are left.

    Raises:
        ScoringError: One of them cannot be listed.
    """
    with scratch_folder(Scratch.PLAN) as folder:
        plan = folder.path / PLAN
        totals = write_plan(plan, open_source(request).ranges(request.rows_per_unit), configuration)
        exists = destination_exists(request)
        state = read_resume_state(open_destination(request).committed_ids() if exists else (), plan)
        planned = Planned(
            units=totals.units,
            rows=totals.rows,
            size_bytes=totals.size_bytes,
            units_before=state.done_units,
            rows_before=state.done_rows,
            stale=len(state.stale),
        )
        # The smallest ids: they are digests, so their units are distributed over the source.
        left = (unit for unit in read_plan(plan) if unit.id not in state.committed)
        return planned, heapq.nsmallest(_SAMPLE_UNITS, left, key=lambda unit: unit.id)


def measure_rate(
    request: ScoreRequest,
    scorer: Scorer,
    units: Sequence[Unit],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Rate:
    """Score pieces of units for about some seconds.

    Raises:
        GraphkilnError: A unit cannot be read, or the session failed.
    """
    source = open_source(request)

    def score(unit: Unit, begin: int, count: int) -> tuple[int, int, float]:
        begun = clock()
        table = scorer.answer(islice(source.rows(unit), begin, begin + count)).table
        errors = len(table) - table.column("error").null_count
        return len(table), errors, max(clock() - begun, 1e-6)

    end = clock() + seconds
    rows, _, taken = score(units[0], 0, _WARM_UP_ROWS)
    piece_rows = max(_WARM_UP_ROWS, int(rows / taken * seconds / _MAX_PIECES))
    pieces = []
    for unit, begin in islice(_piece_starts(units, piece_rows), _MAX_PIECES):
        pieces.append(score(unit, begin, piece_rows))
        if clock() >= end:
            break
    return rate_of(pieces)


def _piece_starts(units: Sequence[Unit], rows: int) -> Iterator[tuple[Unit, int]]:
    """Yield the first piece of each unit, then the second piece of each, ..."""
    for begin in range(0, max(unit.rows for unit in units), rows):
        yield from ((unit, begin) for unit in units if unit.rows > begin)


def rate_of(pieces: Sequence[tuple[int, int, float]]) -> Rate:
    """Compute the rate, and its confidence interval, from pieces of (rows, errors, seconds)."""
    rows, seconds = sum(piece[0] for piece in pieces), sum(piece[2] for piece in pieces)
    rates = [count / taken for count, _, taken in pieces]
    per_s, interval = rows / seconds, None
    if len(rates) > 1:
        margin = _STUDENT[len(rates) - 2] * statistics.stdev(rates) / math.sqrt(len(rates))
        interval = (max(per_s - margin, 0.0), per_s + margin)
    errors = sum(piece[1] for piece in pieces)
    return Rate(rows=rows, errors=errors, pieces=len(pieces), per_s=per_s, interval=interval)


def _predict(rows: int, rate: Rate | None, workers: int, start_s: float) -> tuple[float, tuple[float, float] | None]:
    """Return the duration in seconds and its confidence interval."""
    if rate is None or not workers:
        return 0.0, None
    seconds = start_s + rows / (rate.per_s * workers)
    if rate.interval is None or rate.interval[0] <= 0:
        return seconds, None
    slow, fast = rate.interval
    return seconds, (start_s + rows / (fast * workers), start_s + rows / (slow * workers))
