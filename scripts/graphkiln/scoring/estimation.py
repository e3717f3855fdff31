"""`--dry-run`: what there is to do, and how long it would take, from rows that are really scored here.

Nothing is written to the destination, and no Ray is started; a cluster that is named is asked for its nodes. A worker
of this machine scores rows from all over the source for about ten seconds.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from graphkiln.scoring import check_extra

if TYPE_CHECKING:
    from graphkiln.scoring.options import ScoreOptions
    from graphkiln_backend.scoring.request import ScoreRequest
    from graphkiln_backend.scoring.scorer import Scorer
    from graphkiln_backend.scoring.units import Unit

MEASURED_S = 10.0
_MOST_KEPT = 10  # units that are remembered to be measured; which ones is decided by their ids
_MOST_PIECES = 10
# Scored first, and not counted: memory and caches warm up, and their time says how many rows a second has.
_FIRST_ROWS = 64
# Two-sided 95% of Student's distribution, for 1 to 9 degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers that would be started: by node, their cores, and how many a machine like this one has room for."""

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
class Rate:
    """The measured rate of a worker.

    Attributes:
        rows: How many were measured.
        errors: Rows of these with an error.
        pieces: In how many pieces, from all over the source.
        per_s: Rows per second.
        interval: With 95% confidence; None for a single piece.
    """

    rows: int
    errors: int
    pieces: int
    per_s: float
    interval: tuple[float, float] | None


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
    seconds_interval: tuple[float, float] | None = None


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
    from graphkiln.scoring.mistakes import check_places, check_source
    from graphkiln_backend.cache.settings import CacheSettings
    from graphkiln_backend.scoring.model import describe_session, read_model, with_local_model
    from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
    from graphkiln_backend.system.resources import usable_cores

    check_places(request)
    check_source(request)
    tell("preparing the model")
    begun = time.monotonic()
    with ExitStack() as opened:
        folder = opened.enter_context(scratch_folder(Scratch.SAMPLE)).path
        cache = opened.enter_context(CacheSettings(folder=request.cache).checked().open(folder / "cache"))
        local = with_local_model(request, folder)
        scored = read_model(local, cache, usable_cores())
        workers = plan_workers(request, on_gpu=scored.wants_gpu)
        if workers.cores != usable_cores():
            scored = read_model(local, cache, workers.cores)
        proven = scored.build(cache)
        opened.enter_context(proven.session)
        scorer = opened.enter_context(scored.scorer(proven, request, workers.cores, cache))
        start_s, configuration = time.monotonic() - begun, scored.configuration(request)
        tell("listing the source")
        planned, units = plan_units(request, configuration)
        rate = None
        if units:
            tell(f"scoring rows of the source for about {MEASURED_S:.0f} s")
            rate = measure_rate(request, scorer, units, MEASURED_S)
    seconds, interval = _foresee(planned.rows_left, rate, workers.total, start_s)
    return Estimate(
        configuration=configuration,
        model=f"{scored.name} version {scored.version}",
        session=describe_session(proven),
        planned=planned,
        workers=workers,
        rate=rate,
        start_s=start_s,
        seconds=seconds,
        seconds_interval=interval,
    )


def plan_workers(request: ScoreRequest, *, on_gpu: bool) -> Workers:
    """Place workers as the driver does; their cores are those of a worker on this machine."""
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.scoring.cluster import Node, connect, living_nodes, room_of
    from graphkiln_backend.system.resources import usable_cores

    this = Node(id="", name=socket.gethostname(), cores=usable_cores(), gpus=len(gpus()))
    nodes: Iterable[Node] = [this]
    if request.address:
        with connect(request.address):
            nodes = living_nodes()
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
    """List source and destination.

    Returns:
        What there is to do, and some of the units that are left.

    Raises:
        ScoringError: One of them cannot be listed.
    """
    from graphkiln_backend.scoring.opening import open_destination, open_source
    from graphkiln_backend.scoring.plan import PLAN, read_plan, write_plan
    from graphkiln_backend.scoring.scratch import Scratch, scratch_folder

    with scratch_folder(Scratch.PLAN) as folder:
        plan = folder.path / PLAN
        totals = write_plan(plan, open_source(request).ranges(request.rows_per_unit), configuration)
        is_there = "://" in request.destination or Path(request.destination).exists()
        committed = set(open_destination(request).committed_ids()) if is_there else set()
        before, rows_before, kept = 0, 0, list["Unit"]()
        for unit in read_plan(plan):
            if unit.id in committed:
                before, rows_before = before + 1, rows_before + unit.rows
            elif len(kept) < _MOST_KEPT or unit.id < kept[-1].id:
                # The smallest ids: they are digests, and so spread over the source.
                kept = sorted([*kept, unit], key=lambda each: each.id)[:_MOST_KEPT]
    planned = Planned(
        units=totals.units,
        rows=totals.rows,
        size_bytes=totals.size_bytes,
        units_before=before,
        rows_before=rows_before,
        stale=len(committed) - before,
    )
    return planned, kept


def measure_rate(
    request: ScoreRequest,
    scorer: Scorer,
    units: Sequence[Unit],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Rate:
    """Score rows of units from all over the source for about some seconds.

    Raises:
        GraphkilnError: A unit cannot be read at all, or the session failed.
    """
    from graphkiln_backend.scoring.opening import open_source

    source = open_source(request)

    def score(unit: Unit, begin: int, count: int) -> tuple[int, int, float]:
        begun = clock()
        table = scorer.answer(islice(source.rows(unit), begin, begin + count)).table
        errors = len(table) - table.column("error").null_count
        return len(table), errors, max(clock() - begun, 1e-6)

    end = clock() + seconds
    rows, _, taken = score(units[0], 0, _FIRST_ROWS)
    most = max(_FIRST_ROWS, int(rows / taken * seconds / _MOST_PIECES))
    pieces = []
    for unit, begin in islice(_spans(units, most), _MOST_PIECES):
        pieces.append(score(unit, begin, most))
        if clock() >= end:
            break
    return rate_of(pieces)


def _spans(units: Sequence[Unit], rows: int) -> Iterator[tuple[Unit, int]]:
    """Positions of pieces: the first ones of all units, then the second ones, ..."""
    for begin in range(0, max(unit.rows for unit in units), rows):
        yield from ((unit, begin) for unit in units if unit.rows > begin)


def rate_of(pieces: Sequence[tuple[int, int, float]]) -> Rate:
    """The rate of pieces of (rows, errors, seconds): all rows in all their time; its interval from how they differ."""
    rows, seconds = sum(piece[0] for piece in pieces), sum(piece[2] for piece in pieces)
    rates = [count / taken for count, _, taken in pieces]
    per_s, interval = rows / seconds, None
    if len(rates) > 1:
        margin = _STUDENT[len(rates) - 2] * statistics.stdev(rates) / math.sqrt(len(rates))
        interval = (max(per_s - margin, 0.0), per_s + margin)
    errors = sum(piece[1] for piece in pieces)
    return Rate(rows=rows, errors=errors, pieces=len(pieces), per_s=per_s, interval=interval)


def _foresee(rows: int, rate: Rate | None, workers: int, start_s: float) -> tuple[float, tuple[float, float] | None]:
    """Seconds until the end, and their interval."""
    if rate is None or not workers:
        return 0.0, None
    seconds = start_s + rows / (rate.per_s * workers)
    if rate.interval is None or rate.interval[0] <= 0:
        return seconds, None
    slow, fast = rate.interval
    return seconds, (start_s + rows / (fast * workers), start_s + rows / (slow * workers))
