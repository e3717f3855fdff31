"""A worker: what one process holds to score units of a run. Nothing in here knows Ray, or other processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice

import pyarrow as pa

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.engines.base import Placement, Session
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.replaying import Replay
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
from graphkiln_backend.scoring.model import describe_session, read_model
from graphkiln_backend.scoring.model_fetch import with_local_model
from graphkiln_backend.scoring.opening import open_destination, open_source
from graphkiln_backend.scoring.outcomes import Attempt, Track, UnitReport, WorkerFacts
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.scorer import StageTimes
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_cores

# Proves a worker's session again before anything that it has computed is written.
#
# A core, a memory module or a device may fail long after the self-test. So a unit is committed only after a proof that
# began when the unit had been computed: what lies between two good proofs is kept, what came before a bad one is thrown
# away with its worker. A proof computes a few golden samples, in turns, and holds them by the project's limits to what
# this session computed when all of them had just passed: one sample for a hundred rows of the unit, so that it costs
# about a hundredth of what it proves, and no unit goes without. Units that wait at the same time share one.

_SAMPLES = 4  # of a proof, at most. A fault of the machine shows in any of them.
_ROWS_PER_SAMPLE = 100  # four samples for each unit of 48 rows were 8% of all that was computed


class SharedSession(Closeable):
    """A session that several threads may use: one after the other.

    Args:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()

    @property
    def signature(self) -> Signature:
        """Of the session."""
        return self._session.signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """As the session does."""
        with self._lock:
            return self._session.run(feeds, outputs)

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """As the session reads it back."""
        with self._lock:
            return self._session.placement(feeds)

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


def share(proven: ProvenSession) -> ProvenSession:
    """The same session for several threads: requests and replays take turns on it.

    Args:
        proven: Owned by the result from now on.
    """
    session = SharedSession(proven.session)
    return replace(proven, session=session, replay=proven.replay and replace(proven.replay, session=session))


class Prover:
    """Proves a session while it is used.

    Args:
        replay: The golden samples on the session; None where nothing can be replayed.
        outputs: Those that are used; None for all.

    Raises:
        VerificationError: It does not compute the golden samples now.
    """

    def __init__(self, replay: Replay | None, outputs: Sequence[str] | None) -> None:
        self._replay = replay
        self._outputs = tuple(outputs or (replay.reference if replay else ()))
        self._proving = threading.Lock()
        self._good_since = float("-inf")
        self._proven: list[Mapping[str, AnyArray]] = []
        self._next = 0
        if replay:
            self._proven = [replay.run(sample, self._outputs) for sample in range(len(replay.samples))]
            replay.judge(self._proven)

    def prove(self, computed_at: float, rows: int = _SAMPLES * _ROWS_PER_SAMPLE) -> None:
        """Returns when the session is known to be sound after a moment.

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
            part.judge([part.run(sample, self._outputs) for sample in range(len(chosen))])
        except GraphkilnError as error:
            raise WorkerUnfit(f"it no longer computes the golden samples as it did: {error}") from error


_COMMIT_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts to commit what is computed already
_READ_WAITS_S = (1.0, 4.0)  # between attempts to read a row before it is given up
_TOLD = 300  # characters of an error that is told as an example


class Worker(Closeable):
    """Scores units of one run, two at a time: one is read while the other is computed.

    Args:
        request: The run.

    Raises:
        GraphkilnError: The model cannot be lowered here, or computes wrongly.
    """

    def __init__(self, request: ScoreRequest) -> None:
        begun = time.monotonic()
        self._source, self._destination = open_source(request), open_destination(request)
        self._vanishing = scratch_folder(Scratch.MODEL)
        self._cache = CacheSettings(folder=request.cache).checked().open(self._vanishing.path)
        cores = request.cores_per_worker or usable_cores()
        model = read_model(with_local_model(request, self._vanishing.path), self._cache, cores)
        proven, encoder = share(model.build(self._cache)), model.encoder(request)
        self._scorer = model.scorer(proven, request, cores, self._cache)
        self._session = proven.session
        self._prover = Prover(proven.replay, encoder.outputs)
        self.facts = WorkerFacts(
            node=socket.gethostname(),
            pid=os.getpid(),
            session=describe_session(proven),
            self_test=encode_json(proven.self_test) if proven.self_test else "",
            seconds=time.monotonic() - begun,
            version=version("graphkiln"),
            configuration=model.configuration(request),
        )
        """What it is."""

    def close(self) -> None:
        """Ends its threads, frees the session and removes what it kept."""
        self._scorer.close()
        self._session.close()
        self._cache.close()
        self._vanishing.close()

    def prove(self) -> None:
        """Proves the session now.

        Raises:
            WorkerUnfit: It computes wrongly.
        """
        self._prover.prove(time.monotonic())

    def score(self, attempt: Attempt, track: Track) -> UnitReport | None:
        """Scores a unit and commits it; a probe is computed only, and reports nothing.

        Args:
            attempt: The unit.
            track: Where it tells how far it is.

        Raises:
            InputChanged: The unit is no longer what was planned.
            SourceUnavailable: It cannot be read just now.
            UnitUnreadable: It cannot be read at all.
            WorkerUnfit: The session computes wrongly: nothing was written.
            StoreError: It cannot be written just now.
            ScoringError: The destination refuses it.
        """
        begun, unit = time.monotonic(), attempt.unit
        first = attempt.probe.start if attempt.probe else 0
        quarantined = {position - first: reason for position, reason in attempt.quarantined.items()}
        outages: list[SourceUnavailable] = []
        scored = self._scorer.score(self._rows(attempt, track, outages), quarantined)
        table = scored.table
        if len(outages) > _most_outages(len(table)):  # it is the source, and not some of its rows
            raise outages[0]
        if attempt.probe:
            return None
        if len(table) != unit.rows:
            raise InputChanged(f"{unit.path} has {len(table)} rows where {unit.rows} were planned")
        track.commit()
        self._prover.prove(time.monotonic(), len(table))
        computed = time.monotonic()
        twin = self._commit(Result(unit_id=unit.id, configuration=self.facts.configuration, table=table), track)
        done = time.monotonic()
        return UnitReport(
            unit_id=unit.id,
            rows=len(table),
            errors=len(table) - table.column("error").null_count,
            seconds=done - begun,
            twin=twin,
            times=scored.times + StageTimes(commit_s=done - computed),
            quarantined=_quarantined_ids(attempt, table),
            example=_first_error(table),
        )

    def _rows(self, attempt: Attempt, track: Track, outages: list[SourceUnavailable]) -> Iterator[Row]:
        """The rows of an attempt, each of which tells when it is begun."""
        start, stop = (attempt.probe.start, attempt.probe.stop) if attempt.probe else (0, None)
        rows = islice(enumerate(self._source.rows(attempt.unit)), start, stop)
        while True:
            try:
                position, row = next(rows)
            except StopIteration:
                return
            except (InputChanged, SourceUnavailable):
                raise
            except (GraphkilnError, OSError) as error:
                raise UnitUnreadable(f"{attempt.unit.path}: {error}") from error
            track.reach(position + 1)
            yield replace(row, load=partial(_load, row, track, attempt, outages))

    def _commit(self, result: Result, track: Track) -> bool:
        """Writes a result, patiently; True where another attempt had written it before."""
        for wait_s in (*_COMMIT_WAITS_S, 0.0):
            track.advance()
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


def _load(row: Row, track: Track, attempt: Attempt, outages: list[SourceUnavailable]) -> bytes:
    """Reads a row; called by many threads. What has stopped its unit too often is its own error at last."""
    try:
        return row.load()
    except SourceUnavailable:
        if not attempt.outages_are_errors:
            raise
        return _load_patiently(row, track, outages)
    finally:
        track.advance()


def _load_patiently(row: Row, track: Track, outages: list[SourceUnavailable]) -> bytes:
    """Reads a row some more times while others are read: what only happens now and then is over by then."""
    for wait_s in _READ_WAITS_S:
        time.sleep(wait_s)
        track.advance()
        try:
            return row.load()
        except SourceUnavailable as error:
            last = error
    outages.append(last)
    raise ScoringError(f"{last}, again and again") from last


def _most_outages(rows: int) -> int:
    """How many of so many rows may be unreadable while nobody doubts that their source is there."""
    return min(rows - 1, max(1, rows // 10))


def _first_error(table: pa.Table) -> str:
    errors = table.column("error").drop_null()
    return str(errors[0])[:_TOLD] if len(errors) else ""


def _quarantined_ids(attempt: Attempt, table: pa.Table) -> dict[str, str]:
    ids = table.column("id")
    return {ids[position].as_py(): reason for position, reason in attempt.quarantined.items()}
