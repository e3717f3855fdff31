"""The process that scores units of a run. `worker_process` or Ray runs `WorkerActor`; nothing here imports Ray.

The driver has a unit computed in one call and committed in another, so that it knows what a worker that ends was doing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from graphkiln_backend.graph.errors import GraphkilnError
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
from graphkiln_backend.scoring.loaded_model import LoadedModel
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Computed,
    Content,
    Done,
    Ended,
    Failed,
    Row,
    ScoreRequest,
    StageTimes,
    Survived,
    UnitReport,
    WorkerReady,
)
from graphkiln_backend.scoring.plan import open_destination, open_source
from graphkiln_backend.scoring.scorer import Scored
from graphkiln_backend.scoring.scratch import remove_dead_scratch
from graphkiln_backend.system.closing import Closeable

_COMMIT_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before a commit that failed is tried again
_READ_DELAYS_S = (1.0, 4.0)  # before a row that could not be read is tried again
_EXAMPLE_LENGTH = 300
_PROOF_SAMPLES = 4  # at most; a fault of the machine shows in any of them
_ROWS_PER_SAMPLE = 100  # four samples for every unit of 48 rows took 8% of the time
# The first match counts: ScoringError is a base class of the others.
_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (InputChanged, Cause.CHANGED),
    (SourceUnavailable, Cause.SOURCE),
    (UnitUnreadable, Cause.UNREADABLE),
    (StoreError, Cause.STORE),
    (ScoringError, Cause.REFUSED),
)


class WorkerActor:
    """The calls of the driver. Each returns an outcome, even if a row raises something unexpected.

    Args:
        name: Name of the worker.
        request: The run, with the cores of this worker as `cores_per_worker`.
    """

    def __init__(self, name: str, request: ScoreRequest) -> None:
        self._name, self._request = name, request
        self._worker: Worker
        self._started = False
        self._computed: dict[int, ComputedUnit] = {}

    def start(self) -> WorkerReady | Ended:
        """Build the worker and prove its session."""
        remove_dead_scratch()
        try:
            self._worker = Worker(self._request)
        except GraphkilnError as error:
            return Ended(worker=self._name, blame=Blame.WORKER, reason=f"it could not start: {error}")
        self._started = True
        return WorkerReady(worker=self._name, facts=self._worker.facts)

    def compute(self, attempt: Attempt) -> Computed | Survived | Failed | Ended:
        """Compute the rows of an attempt."""
        try:
            if attempt.probe is not None:
                self._worker.answer(attempt)
                return Survived(worker=self._name, attempt=attempt.number)
            self._computed[attempt.number] = self._worker.compute(attempt)
        except BaseException as error:  # noqa: BLE001 - also panics of Rust code, which are no Exception
            return self._failed(attempt.number, error)
        return Computed(worker=self._name, attempt=attempt.number)

    def commit(self, number: int) -> Done | Failed | Ended:
        """Commit a computed attempt."""
        try:
            report = self._worker.commit(self._computed.pop(number))
        except BaseException as error:  # noqa: BLE001 - as in `compute`
            return self._failed(number, error)
        return Done(worker=self._name, attempt=number, report=report)

    def progress(self, wait_s: float) -> int:
        """Return, after a delay, a counter that grows with any progress: the heartbeat of the worker."""
        time.sleep(wait_s)
        return self._worker.progress if self._started else 0

    def close(self) -> None:
        """Free the session and remove temporary files."""
        if self._started:
            self._worker.close()

    def _failed(self, number: int, error: BaseException) -> Failed | Ended:
        cause = cause_of(error)
        try:
            if isinstance(error, WorkerUnfit):
                raise error
            if cause is Cause.ROWS:
                self._worker.prove()
        except WorkerUnfit as unfit:
            return Ended(worker=self._name, blame=Blame.WORKER, reason=str(unfit))
        reason = f"raised {type(error).__name__}: {error}" if cause is Cause.ROWS else str(error)
        return Failed(worker=self._name, attempt=number, cause=cause, reason=reason)


def cause_of(error: BaseException) -> Cause:
    """Classify the error of an attempt; an unknown error may be caused by a row."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), Cause.ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedUnit:
    """A unit that is ready to be committed.

    Attributes:
        started: Start of the attempt, by `time.monotonic`.
    """

    attempt: Attempt
    scored: Scored
    started: float


class Worker(Closeable):
    """Scores units of one run, two at a time: one is read while the other is computed.

    Attributes:
        facts: Description for the driver.

    Raises:
        GraphkilnError: The model cannot be lowered on this machine, or computes wrong answers.
    """

    def __init__(self, request: ScoreRequest) -> None:
        self._steps = 0  # rows and writes
        self._source, self._destination = open_source(request), open_destination(request)
        self._model = LoadedModel(request)
        self._scorer, self._prover, self.facts = self._model.scorer, self._model.prover, self._model.facts

    @property
    def progress(self) -> int:
        """Counter that grows with any progress: with each row, batch and write."""
        return self._steps + self._scorer.computed_batches

    def close(self) -> None:
        """Stop the threads, free the session and remove temporary files."""
        self._model.close()

    def prove(self) -> None:
        """Replay golden samples now.

        Raises:
            WorkerUnfit: The session computes wrong answers.
        """
        self._prover.prove(time.monotonic())

    def answer(self, attempt: Attempt) -> Scored:
        """Compute the rows of an attempt or of its probe.

        Raises:
            InputChanged: The unit differs from the plan.
            SourceUnavailable: Temporary failure of the source.
            UnitUnreadable: The unit cannot be read at all.
        """
        first = attempt.probe.start if attempt.probe is not None else 0
        quarantined = {position - first: reason for position, reason in attempt.quarantined.items()}
        outages: list[SourceUnavailable] = []  # of rows that were given up
        scored = self._scorer.answer(self._rows(attempt, outages), quarantined)
        rows = attempt.unit.rows
        # More than a tenth of the unit, or all of it: the source is down.
        if len(outages) > min(rows - 1, max(1, rows // 10)):
            raise outages[0]
        return scored

    def compute(self, attempt: Attempt) -> ComputedUnit:
        """Compute a whole unit; raises as `answer`."""
        started, unit = time.monotonic(), attempt.unit
        scored = self.answer(attempt)
        if len(scored.table) != unit.rows:
            raise InputChanged(f"{unit.path} has {len(scored.table)} rows, {unit.rows} were planned")
        return ComputedUnit(attempt=attempt, scored=scored, started=started)

    def commit(self, computed: ComputedUnit) -> UnitReport:
        """Prove the session again, and commit a unit.

        Raises:
            WorkerUnfit: The session computes wrong answers; nothing was written.
            StoreError: Failure of the destination.
            ScoringError: The destination does not accept the result.
        """
        unit, table = computed.attempt.unit, computed.scored.table
        self._prover.prove(time.monotonic(), len(table))
        proven = time.monotonic()
        twin = self._write(Result(unit_id=unit.id, configuration=self.facts.configuration, table=table))
        done = time.monotonic()
        errors, ids = table.column("error").drop_null(), table.column("id")
        return UnitReport(
            unit_id=unit.id,
            rows=len(table),
            errors=len(errors),
            seconds=done - computed.started,
            twin=twin,
            times=computed.scored.times + StageTimes(commit_s=done - proven),
            quarantined={ids[at].as_py(): reason for at, reason in computed.attempt.quarantined.items()},
            example=str(errors[0])[:_EXAMPLE_LENGTH] if len(errors) else "",
        )

    def _write(self, result: Result) -> bool:
        """Write a result, with retries.

        Returns:
            True if the unit already had a result: of an attempt whose worker ended before it could report it, or of a
            write that reported an error although it succeeded.
        """
        for delay_s in (*_COMMIT_DELAYS_S, 0.0):
            self._steps += 1
            try:
                self._destination.commit(result)
            except CommitConflict:
                return True
            except StoreError as error:
                if not (error.passing and delay_s):
                    raise
                time.sleep(delay_s)
            else:
                return False
        raise AssertionError("the last write returns or raises")

    def _rows(self, attempt: Attempt, outages: list[SourceUnavailable]) -> Iterator[Row]:
        start, stop = (attempt.probe.start, attempt.probe.stop) if attempt.probe is not None else (0, None)
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
            self._steps += 1
            yield replace(row, load=partial(self._load, row, outages if attempt.outages_are_errors else None))

    def _load(self, row: Row, outages: list[SourceUnavailable] | None) -> Content:
        """Read the image of a row.

        Called from many threads: a row is retried while others are read.

        Args:
            row: The row.
            outages: List that collects the errors of rows that are given up; None to fail at once.
        """
        for delay_s in (*(_READ_DELAYS_S if outages is not None else ()), 0.0):
            try:
                return row.load()
            except SourceUnavailable as error:
                if outages is None:
                    raise
                if not delay_s:
                    outages.append(error)
                    raise ScoringError(f"{error}, again and again") from error
            finally:
                self._steps += 1
            time.sleep(delay_s)
        raise AssertionError("the last read returns or raises")
