"""A worker: the process that scores units of a run. Ray runs it as an actor; nothing in here imports Ray.

The driver has a unit computed in one call and committed in another, so that it knows of a worker that ends whether rows
or the destination were at work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.errors import (
    CommitConflict,
    InputChanged,
    ScoringError,
    SourceUnavailable,
    StoreError,
    UnitUnreadable,
    WorkerUnfit,
)
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Failed,
    Ready,
    StageTimes,
    UnitReport,
    WorkerFacts,
)
from graphkiln_backend.scoring.model import describe_session, read_model, with_local_model
from graphkiln_backend.scoring.opening import open_destination, open_source
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.scorer import Scored
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.scoring.units import Row
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_cores

_COMMIT_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts to commit what is computed already
_READ_WAITS_S = (1.0, 4.0)  # between attempts to read a row before it is given up
_EXAMPLE = 300  # characters of an error that is reported as an example
_SAMPLES = 4  # of a proof, at most. A fault of the machine shows in any of them.
_ROWS_PER_SAMPLE = 100  # four samples for each unit of 48 rows were 8% of all that was computed
# The first that fits counts: the last one is a base class of all others.
_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (InputChanged, Cause.CHANGED),
    (SourceUnavailable, Cause.SOURCE),
    (UnitUnreadable, Cause.UNREADABLE),
    (StoreError, Cause.STORE),
    (ScoringError, Cause.REFUSED),
)


class WorkerActor:
    """The calls that the driver makes; each returns an outcome, whatever a row does.

    Args:
        name: Name of the worker.
        request: The run; its `cores_per_worker` is what this one has.
    """

    def __init__(self, name: str, request: ScoreRequest) -> None:
        self._name, self._request = name, request
        self._worker: Worker | None = None
        self._computed: dict[int, Computed] = {}

    def start(self) -> Ready | Ended:
        """Build the worker and prove its session."""
        remove_dead_scratch()
        try:
            self._worker = Worker(self._request)
        except GraphkilnError as error:
            return Ended(worker=self._name, blame=Blame.WORKER, reason=f"it could not start: {error}")
        return Ready(worker=self._name, facts=self._worker.facts)

    def compute(self, number: int, attempt: Attempt) -> Done | Failed | Ended | None:
        """Compute an attempt; None where its result is to be committed next."""
        try:
            computed = self._started.compute(attempt)
        except BaseException as error:  # noqa: BLE001 - whatever a row does must reach the driver: Rust panics, too
            return self._explain(number, error)
        if computed is None:
            return Done(worker=self._name, attempt=number, report=None)
        self._computed[number] = computed
        return None

    def commit(self, number: int) -> Done | Failed | Ended:
        """Commit what was computed."""
        try:
            report = self._started.commit(self._computed.pop(number))
        except BaseException as error:  # noqa: BLE001 - likewise
            return self._explain(number, error)
        return Done(worker=self._name, attempt=number, report=report)

    def progress(self, wait_s: float) -> int:
        """Return, after a while, a number that has grown if anything went on: the heartbeat of the worker."""
        time.sleep(wait_s)
        return self._worker.progress if self._worker else 0

    def close(self) -> None:
        """Free the session, and remove what was kept."""
        if self._worker:
            self._worker.close()

    @property
    def _started(self) -> Worker:
        assert self._worker is not None  # noqa: S101 - nothing is assigned before it is ready
        return self._worker

    def _explain(self, number: int, error: BaseException) -> Failed | Ended:
        if isinstance(error, WorkerUnfit):
            return self._unfit(error)
        cause = cause_of(error)
        if cause is Cause.ROWS:  # unless the worker itself is to blame
            try:
                self._started.prove()
            except WorkerUnfit as found:
                return self._unfit(found)
        reason = f"raised {type(error).__name__}: {error}" if cause is Cause.ROWS else str(error)
        return Failed(worker=self._name, attempt=number, cause=cause, reason=reason)

    def _unfit(self, error: WorkerUnfit) -> Ended:
        return Ended(worker=self._name, blame=Blame.WORKER, reason=str(error))


def cause_of(error: BaseException) -> Cause:
    """Classify the error of an attempt in a worker that is fit; anything unknown may be a row's doing."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), Cause.ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """A unit whose rows are computed.

    Attributes:
        scored: The answers of all rows, and what they took.
        begun: When it was begun, by `time.monotonic`.
    """

    attempt: Attempt
    scored: Scored
    begun: float


class Worker(Closeable):
    """Scores units of one run, two at a time: one is read while the other is computed.

    Args:
        request: The run.

    Attributes:
        facts: Description for the driver.
        progress: Grows while anything goes on.

    Raises:
        GraphkilnError: The model cannot be lowered here, or computes wrongly.
    """

    def __init__(self, request: ScoreRequest) -> None:
        begun = time.monotonic()
        self.progress = 0
        self._source, self._destination = open_source(request), open_destination(request)
        self._vanishing = scratch_folder(Scratch.MODEL)
        self._cache = CacheSettings(folder=request.cache).checked().open(self._vanishing.path)
        cores = request.cores_per_worker or usable_cores()
        model = read_model(with_local_model(request, self._vanishing.path), self._cache, cores)
        proven, encoder = model.build(self._cache), model.encoder(request)
        self._scorer = model.scorer(proven, request, cores, self._cache)
        self._session = proven.session
        self._prover = Prover(proven.replay, encoder.outputs, self._scorer.computing)
        self.facts = WorkerFacts(
            node=socket.gethostname(),
            pid=os.getpid(),
            session=describe_session(proven),
            self_test=encode_json(proven.self_test) if proven.self_test else "",
            seconds=time.monotonic() - begun,
            version=version("graphkiln"),
            configuration=model.configuration(request),
        )

    def close(self) -> None:
        """End its threads, free the session and remove what it kept."""
        self._scorer.close()
        self._session.close()
        self._cache.close()
        self._vanishing.close()

    def prove(self) -> None:
        """Prove the session now.

        Raises:
            WorkerUnfit: It computes wrongly.
        """
        self._prover.prove(time.monotonic())

    def compute(self, attempt: Attempt) -> Computed | None:
        """Compute a unit; None for a probe, of which nothing is kept.

        Raises:
            InputChanged: The unit is no longer what was planned.
            SourceUnavailable: It cannot be read just now.
            UnitUnreadable: It cannot be read at all.
        """
        begun, unit = time.monotonic(), attempt.unit
        first = attempt.probe.start if attempt.probe else 0
        quarantined = {position - first: reason for position, reason in attempt.quarantined.items()}
        outages: list[SourceUnavailable] = []  # `_load_patiently` adds to it: of each row that was given up
        scored = self._scorer.answer(self._rows(attempt, outages), quarantined)
        rows = len(scored.table)
        if len(outages) > _most_error_rows(rows):  # it is the source, and not some of its rows
            raise outages[0]
        if attempt.probe:
            return None
        if rows != unit.rows:
            raise InputChanged(f"{unit.path} has {rows} rows where {unit.rows} were planned")
        return Computed(attempt=attempt, scored=scored, begun=begun)

    def commit(self, computed: Computed) -> UnitReport:
        """Prove the session again, and commit a unit.

        Raises:
            WorkerUnfit: The session computes wrongly: nothing was written.
            StoreError: The unit cannot be written just now.
            ScoringError: The destination refuses it.
        """
        unit, table = computed.attempt.unit, computed.scored.table
        self._prover.prove(time.monotonic(), len(table))
        proven = time.monotonic()
        twin = self._commit(Result(unit_id=unit.id, configuration=self.facts.configuration, table=table))
        done = time.monotonic()
        errors, ids = table.column("error").drop_null(), table.column("id")
        return UnitReport(
            unit_id=unit.id,
            rows=len(table),
            errors=len(errors),
            seconds=done - computed.begun,
            twin=twin,
            times=computed.scored.times + StageTimes(commit_s=done - proven),
            quarantined={ids[at].as_py(): reason for at, reason in computed.attempt.quarantined.items()},
            example=str(errors[0])[:_EXAMPLE] if len(errors) else "",
        )

    def _commit(self, result: Result) -> bool:
        """Write a result, patiently.

        Returns:
            Whether it has a twin: the result of an attempt that did not live to report it, or of a try of this one
            whose error came after the write.
        """
        for wait_s in (*_COMMIT_WAITS_S, 0.0):
            self.progress += 1
            try:
                self._destination.commit(result)
            except CommitConflict:
                return True
            except StoreError as error:
                if not (error.passing and wait_s):
                    raise
                time.sleep(wait_s)
            else:
                return False
        raise AssertionError("the last attempt returns or raises")

    def _rows(self, attempt: Attempt, outages: list[SourceUnavailable]) -> Iterator[Row]:
        """The rows of an attempt."""
        start, stop = (attempt.probe.start, attempt.probe.stop) if attempt.probe else (0, None)
        rows = islice(self._source.rows(attempt.unit), start, stop)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except (InputChanged, SourceUnavailable):
                raise
            except (GraphkilnError, OSError) as error:
                raise UnitUnreadable(f"{attempt.unit.path}: {error}") from error
            self.progress += 1
            yield replace(row, load=partial(self._load, row, attempt, outages))

    def _load(self, row: Row, attempt: Attempt, outages: list[SourceUnavailable]) -> bytes:
        """Read a row; called by many threads. What has stopped its unit too often is its own error at last."""
        try:
            return row.load()
        except SourceUnavailable:
            if not attempt.outages_are_errors:
                raise
            return self._load_patiently(row, outages)
        finally:
            self.progress += 1

    def _load_patiently(self, row: Row, outages: list[SourceUnavailable]) -> bytes:
        """Read a row some more times while others are read: what only happens now and then is over by then."""
        for wait_s in _READ_WAITS_S:
            time.sleep(wait_s)
            self.progress += 1
            try:
                return row.load()
            except SourceUnavailable as error:
                last = error
        outages.append(last)
        raise ScoringError(f"{last}, again and again") from last


def _most_error_rows(rows: int) -> int:
    """How many rows of a unit may become errors because they cannot be read: a tenth of them, but never all."""
    return min(rows - 1, max(1, rows // 10))


class Prover:
    """Proves a session again before anything that it has computed is written.

    A core, a memory module or a device may fail long after the self-test. So a unit is committed only after a proof
    that began when the unit had been computed: what lies between two good proofs is kept, what came before a bad one is
    thrown away with its worker. A proof computes a few golden samples, in turns, and holds them by the project's limits
    to what this session computed when all of them had just passed: one sample for a hundred rows of the unit, so that
    it costs about a hundredth of what it proves, and no unit goes without. Units that wait at the same time share one.
    It does not look at a row that fails by itself while the others of its unit are answered: before that becomes the
    row's error, `model.check_session` computes all samples.

    Args:
        replay: The golden samples on the session; None where nothing can be replayed.
        outputs: Those that are used; None for all.
        computing: Held while the session runs: it has one caller at a time.

    Raises:
        VerificationError: It does not compute the golden samples now.
    """

    def __init__(self, replay: Replay | None, outputs: Sequence[str] | None, computing: threading.Lock) -> None:
        self._replay, self._computing = replay, computing
        self._outputs = tuple(outputs or (replay.reference if replay else ()))
        self._proving = threading.Lock()
        self._good_since = float("-inf")
        self._proven: list[Mapping[str, AnyArray]] = []
        self._next = 0
        if replay:
            self._proven = self._compute(replay)
            replay.judge(self._proven)

    def prove(self, computed_at: float, rows: int = _SAMPLES * _ROWS_PER_SAMPLE) -> None:
        """Return when the session is known to be sound after a moment.

        Args:
            computed_at: The moment, by `time.monotonic`, when what is to be written had been computed.
            rows: How many rows that is.

        Raises:
            WorkerUnfit: It is not: nothing that it has computed since the last proof may be written.
        """
        if self._replay is None:
            return
        with self._proving:
            if self._good_since >= computed_at:
                return
            begun = time.monotonic()
            self._run(self._replay, max(1, min(_SAMPLES, rows // _ROWS_PER_SAMPLE)))
            self._good_since = begun

    def _run(self, replay: Replay, most: int) -> None:
        count = len(replay.samples)
        chosen = [(self._next + index) % count for index in range(min(most, count))]
        self._next = (self._next + len(chosen)) % count
        samples, proven = [replay.samples[each] for each in chosen], [self._proven[each] for each in chosen]
        part = replace(replay, samples=tuple(samples), reference=joined(proven))
        try:
            part.judge(self._compute(part))
        except GraphkilnError as error:
            raise WorkerUnfit(f"it no longer computes the golden samples as it did: {error}") from error

    def _compute(self, replay: Replay) -> list[Mapping[str, AnyArray]]:
        computed: list[Mapping[str, AnyArray]] = []
        for sample in range(len(replay.samples)):
            with self._computing:  # batches of units may come between two samples
                computed.append(replay.run(sample, self._outputs))
        return computed
