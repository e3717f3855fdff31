"""One model over two groups of cores: copies, stages and shards beside each other and beside the whole model.

Throughput is that of batches behind each other, latency that of one row alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from apart import measure_apart
from inputs import CACHE
from measurement import SetUp, Summary, measure, ratio_of, show_progress
from parallel_models import GRAPHS, synthetic_rows
from parallel_peer import CALLERS, WAYS, Peer
from parts import Parts
from split_sessions import Stopwatch, plan_instance, prove, time_sums

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError, MeasurementError
from graphkiln_backend.graph.parallelism import Parallelism
from graphkiln_backend.lowering.parallel.worker import Worker
from graphkiln_backend.lowering.spreading import Spread
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import usable_cores

PARTS = CACHE / "parallel"
"""Where each model is kept as it is done."""
_BATCH = 16
_COPIES, _STAGES, _SHARDS, _ONE, _TWO = "data=2", "pipeline=2", "tensor=2", "1 core", "2 cores"
_IN_TURN = "pipeline=2, 2 instances"
_NUMBERS = {
    _COPIES: Parallelism(data=2),
    _STAGES: Parallelism(pipeline=2),
    _SHARDS: Parallelism(tensor=2),
    _IN_TURN: Parallelism(data=1, pipeline=2),
}
_COUNTS = {f"micro_batches={count}": count for count in (1, 2, 4, 8, 16)}
_NUMBERS |= {name: Parallelism(pipeline=2, micro_batches=count) for name, count in _COUNTS.items()}
_THROUGHPUT, _LATENCY, _PARTS = f"batches of {_BATCH}", "one row", f"one batch of {_BATCH}"
_REFERENCE = {_THROUGHPUT: _COPIES, _LATENCY: _ONE, _PARTS: _STAGES}
"""What is measured -> the set-up that others are compared with: of parts of a batch, as many as the plan chooses."""
_MEASURED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "large product": {_LATENCY: (_ONE, _TWO, _SHARDS), _PARTS: (_STAGES, *_COUNTS)},
    "resnet50": {_THROUGHPUT: (_COPIES, _STAGES, _IN_TURN, *WAYS), _PARTS: (_STAGES, *_COUNTS)},
    "vit_b_16": {_LATENCY: (_ONE, _TWO, _SHARDS)},
    "bert_base": {_LATENCY: (_ONE, _TWO, _SHARDS), _THROUGHPUT: (_COPIES, _STAGES, _IN_TURN)},
}
"""Model -> what is measured -> set-ups."""
_QUICKLY: Mapping[str, Any] = {"batch_sizes": (1,), "self_test": False}
"""What a session shows before it is measured: that it computes. What splits compute is proven elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """A set-up: what runs a request, how many callers keep it busy, the split.

    And what its runs and the sums of its shards took; None where nothing is added up.
    """

    run: Callable[[dict[str, AnyArray]], object]
    callers: int = 1
    spread: Spread | None = None
    runs: Stopwatch = field(default_factory=Stopwatch)
    sums: Stopwatch | None = None


def benchmark_parallel(rounds: int, seconds: float, only: str = "") -> list[dict[str, object]]:
    """Every model that is done, those that are not measured now.

    Args:
        rounds: That count.
        seconds: Of one measurement.
        only: Measure this model, also where it is done, and no other.

    Raises:
        LoweringError: There are not two cores.
        SystemExit: There is no such model, or one of them could not be measured; what was measured is kept.
    """
    if usable_cores() < 2:
        raise LoweringError("two groups of cores are compared", attempts=("one core is here",))
    if only and only not in _MEASURED:
        sys.exit(f"there is no model '{only}': {', '.join(_MEASURED)}")
    parts, failed = Parts(PARTS, rounds, seconds), []
    for name in [only] if only else _MEASURED:
        measure = partial(measure_apart, name, partial(_measure_model, name, rounds, seconds))
        try:
            parts.measure(name, measure, again=bool(only))
        except MeasurementError as error:
            failed.append(str(error))
    if failed:
        sys.exit("\n".join(failed))
    return [row for name in _MEASURED for row in parts.read(name) or ()]


def _measure_model(name: str, rounds: int, seconds: float) -> list[dict[str, object]]:
    graph, rows = GRAPHS[name](), list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache:
        for what, set_ups in _MEASURED[name].items():
            batch = 1 if what == _LATENCY else _BATCH
            with ExitStack() as opened:
                built = _build_all(name, graph, set_ups, batch, cache, opened)
                found = measure(_set_ups(built, synthetic_rows(graph, batch)), rounds, seconds)
                rows += [_row(name, what, each, built[each], found, batch) for each in built]
    return rows


def _set_ups(built: Mapping[str, _Built], feeds: dict[str, AnyArray]) -> list[SetUp]:
    return [SetUp(name=name, concurrency=b.callers, request=partial(b.run, feeds)) for name, b in built.items()]


def _build_all(  # noqa: PLR0917 - all of them are needed
    name: str, graph: Path, set_ups: Sequence[str], batch: int, cache: ArtifactCache, opened: ExitStack
) -> dict[str, _Built]:
    """What can be built; why others cannot is printed."""
    built = {}
    for set_up in set_ups:
        show_progress(f"{name}: building {set_up}")
        try:
            built[set_up] = _build(graph, set_up, batch, cache, opened)
        except LoweringError as error:
            show_progress("")
            print(f"{name}, {set_up}: {error}")
    return built


def _build(graph: Path, set_up: str, batch: int, cache: ArtifactCache, opened: ExitStack) -> _Built:
    if set_up in WAYS:
        return _Built(run=Peer(graph, WAYS[set_up]).run, callers=CALLERS)
    numbers = _NUMBERS.get(set_up)
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    if numbers and not numbers.splits:
        return _copies(version, numbers, batch, cache, opened)
    if numbers and numbers.data:
        return _in_turn(version, numbers, batch, cache, opened)
    planned = plan_instance(version, numbers, cores=1 if set_up == _ONE else 2, largest_batch=batch)
    session = opened.enter_context(prove(planned, cache, **_QUICKLY).session)
    runs, sums = Stopwatch(), Stopwatch()
    added = time_sums(session, sums)
    return _Built(
        run=lambda feeds: runs.time(session.run, feeds), spread=planned.spread, runs=runs, sums=sums if added else None
    )


def _copies(version: ModelVersion, numbers: Parallelism, batch: int, cache: ArtifactCache, opened: ExitStack) -> _Built:
    """Whole sessions in threads on cores of their own; a caller takes the next free one."""
    free: SimpleQueue[tuple[Worker, Session]] = SimpleQueue()
    for instance in range(numbers.data):
        planned = plan_instance(
            version, numbers, cores=2, largest_batch=batch, instances=numbers.data, instance=instance
        )
        worker = opened.enter_context(Worker(planned.resources.places[0].cores))
        proven = worker.submit(prove, planned, cache, **_QUICKLY).result()
        free.put((worker, opened.enter_context(proven.session)))

    def run(feeds: dict[str, AnyArray]) -> object:
        worker, session = free.get()
        try:
            return worker.submit(session.run, feeds).result()
        finally:
            free.put((worker, session))

    return _Built(run=run, callers=numbers.data)


def _in_turn(
    version: ModelVersion, numbers: Parallelism, batch: int, cache: ArtifactCache, opened: ExitStack
) -> _Built:
    """Two instances on the same stages; a caller takes the one that is free."""
    free: SimpleQueue[Session] = SimpleQueue()
    for instance in range(2):
        planned = plan_instance(version, numbers, cores=2, largest_batch=batch, instances=2, instance=instance)
        free.put(opened.enter_context(prove(planned, cache, **_QUICKLY).session))

    def run(feeds: dict[str, AnyArray]) -> object:
        session = free.get()
        try:
            return session.run(feeds)
        finally:
            free.put(session)

    return _Built(run=run, callers=2, spread=planned.spread)


def _row(  # noqa: PLR0917 - the columns
    model: str, what: str, set_up: str, built: _Built, found: Mapping[str, Summary], batch: int
) -> dict[str, object]:
    ratio = ratio_of(found[set_up].rates, found[_REFERENCE[what]].rates)
    split = built.spread.split if built.spread else None
    chosen = f": {split.numbers.micro_batches} chosen" if split and (what, set_up) == (_PARTS, _STAGES) else ""
    share = max(stage.weight_bytes for stage in split.stages) / split.whole.weight_bytes if split else 1.0
    return {
        "model": model,
        "measured": what,
        "set-up": f"{set_up}{chosen}",
        "samples/s": round(found[set_up].per_second * batch, 2),
        "p50 ms": round(found[set_up].p50_ms, 1),
        "ratio": ratio.median,
        "spread": ratio.spread,
        "weights a device": f"{share:.0%}",
        "sums": sum_share(built),
    }


def sum_share(built: _Built) -> str:
    """Of all that a set-up ran, the share that adding up took; `-` where nothing is added up."""
    return f"{built.sums.seconds / built.runs.seconds:.1%}" if built.sums and built.runs.seconds else "-"
