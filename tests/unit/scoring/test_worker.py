"""A worker in this process: rows that fail, a store that is slow to recover, proofs before commits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring_runs import make_images, make_request, results

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, VerificationError
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.scoring import worker as module
from graphkiln_backend.scoring.errors import (
    InputChanged,
    ScoringError,
    SourceUnavailable,
    StoreError,
    UnitUnreadable,
    WorkerUnfit,
)
from graphkiln_backend.scoring.loaded_model import Prover
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Computed,
    Done,
    Ended,
    Failed,
    Row,
    Span,
    Survived,
    Unit,
    UnitReport,
)
from graphkiln_backend.scoring.worker import Worker, WorkerActor, cause_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("source") / "images", 12, {4: b"no image"})


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Worker]:
    destination = folder.parent / "out"
    destination.mkdir()
    with Worker(make_request(folder, destination, rows_per_unit=100)) as worker:
        yield worker


@pytest.fixture
def worker(shared: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(module, "_COMMIT_DELAYS_S", (0.001, 0.001, 0.001))
    yield shared
    shared._destination.remove(list(shared._destination.committed_ids()))


def score(worker: Worker, attempt: Attempt) -> UnitReport:
    return worker.commit(worker.compute(attempt))


@pytest.fixture
def unit(worker: Worker) -> Unit:
    (found,) = [each.unit("configuration") for each in worker._source.ranges(100)]
    return found


def test_unit_is_scored_once_with_its_errors(worker: Worker, unit: Unit, folder: Path) -> None:
    report = score(worker, Attempt(number=1, unit=unit))
    assert (report.rows, report.errors, report.twin) == (12, 1, False)
    again = score(worker, Attempt(number=1, unit=unit))
    assert again.twin
    assert results(folder.parent / "out").num_rows == 12


def test_changed_row_fails_the_attempt(worker: Worker, unit: Unit, folder: Path) -> None:
    path = folder / "00007.png"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        with pytest.raises(InputChanged):
            score(worker, Attempt(number=1, unit=unit))
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("failing", [1, 2])
def test_few_unreadable_rows_become_errors_in_the_last_attempt(
    worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """If more rows cannot be read, the source is down and nothing is committed."""

    def fail() -> bytes:
        raise SourceUnavailable("cannot read it: Input/output error")

    rows = [replace(row, load=fail) if n < failing else row for n, row in enumerate(worker._source.rows(unit))]
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(rows), raising=False)
    with pytest.raises(SourceUnavailable):
        score(worker, Attempt(number=1, unit=unit))
    monkeypatch.setattr(module, "_READ_DELAYS_S", (0.001, 0.001))
    if failing > 1:
        with pytest.raises(SourceUnavailable):
            score(worker, Attempt(number=1, unit=unit, outages_are_errors=True))
        assert list(worker._destination.committed_ids()) == []
        return
    report = score(worker, Attempt(number=1, unit=unit, outages_are_errors=True))
    assert (report.rows, report.errors) == (12, 2), "and one that is no image"
    assert report.example == "cannot read it: Input/output error, again and again"


def test_probe_of_an_unreadable_row_succeeds(worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the share of the whole unit shows that the source is down."""

    def fail() -> bytes:
        raise SourceUnavailable("cannot read it: Input/output error")

    monkeypatch.setattr(module, "_READ_DELAYS_S", ())
    rows = [replace(row, load=fail) if n == 7 else row for n, row in enumerate(worker._source.rows(unit))]
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(rows), raising=False)
    probe = Attempt(number=1, unit=unit, probe=Span(start=7, stop=8), outages_are_errors=True)
    assert len(worker.answer(probe).table) == 1


def test_computed_batch_is_progress(worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_done = worker.progress + 2 * unit.rows  # each is pulled and loaded
    session, seen = worker._scorer.session, list[int]()

    class Slow:
        def run(self, *arguments: Any) -> object:
            while worker.progress < rows_done:
                time.sleep(0.001)
            seen.append(worker.progress)
            return session.run(*arguments)

    monkeypatch.setattr(worker._scorer, "session", Slow())
    monkeypatch.setattr(worker._scorer, "batch_size", 4)
    worker.answer(Attempt(number=1, unit=unit))
    assert seen == sorted(set(seen))
    assert len(seen) > 1


def test_unit_with_missing_rows_is_not_committed(worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(worker._source.rows(unit))
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(rows[:-1]), raising=False)
    with pytest.raises(InputChanged, match="has 11 rows"):
        score(worker, Attempt(number=1, unit=unit))
    assert list(worker._destination.committed_ids()) == []


def test_unreadable_unit_is_reported(worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Unit) -> Iterator[Row]:
        raise OSError("torn")
        yield

    monkeypatch.setattr(worker._source, "rows", broken, raising=False)
    with pytest.raises(UnitUnreadable, match="torn"):
        score(worker, Attempt(number=1, unit=unit))


def test_row_is_answered_after_a_read_is_retried(worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_DELAYS_S", (0.001, 0.001))
    rows, refused = list(worker._source.rows(unit)), set()

    def load(row: Row) -> bytes:
        if row.id not in refused:
            refused.add(row.id)
            raise SourceUnavailable("slow down")
        return row.load()

    busy = [replace(row, load=partial(load, row)) for row in rows]
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(busy), raising=False)
    report = score(worker, Attempt(number=1, unit=unit, outages_are_errors=True))
    assert (report.rows, report.errors, len(refused)) == (12, 1, 12)


@pytest.mark.parametrize("passing", [True, False])
def test_only_temporary_store_failures_are_retried(
    worker: Worker, unit: Unit, monkeypatch: pytest.MonkeyPatch, passing: bool
) -> None:
    calls, failures = 0, 3 if passing else 0
    commit = worker._destination.commit

    def fail(result: object) -> None:
        nonlocal calls
        calls += 1
        if calls <= failures or not passing:
            raise StoreError("busy", passing=passing)
        commit(result)  # type: ignore[arg-type]

    monkeypatch.setattr(worker._destination, "commit", fail, raising=False)
    if passing:
        score(worker, Attempt(number=1, unit=unit))
    else:
        with pytest.raises(StoreError):
            score(worker, Attempt(number=1, unit=unit))
    assert calls == failures + 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (InputChanged("it changed"), Cause.CHANGED),
        (SourceUnavailable("no network"), Cause.SOURCE),
        (UnitUnreadable("torn"), Cause.UNREADABLE),
        (StoreError("the disk is full"), Cause.STORE),
        (ScoringError("other columns"), Cause.REFUSED),
        (ExecutionError("out of range"), Cause.ROWS),
        (MemoryError(), Cause.ROWS),
    ],
)
def test_cause_of_an_error(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause


class Broken:
    """A worker that fails, and whose session may compute wrong answers."""

    def __init__(self, error: BaseException, *, unfit: bool) -> None:
        self._error, self._unfit = error, unfit

    def compute(self, _: object) -> None:
        raise self._error

    def prove(self) -> None:
        if self._unfit:
            raise WorkerUnfit("it computes wrongly")


def answer(error: BaseException, *, unfit: bool) -> object:
    actor = WorkerActor("worker-1", make_request(Path("in"), Path("out")))
    actor._worker = Broken(error, unfit=unfit)  # type: ignore[assignment]
    return actor.compute(Attempt(number=3, unit=Unit(id="1", path="in", part="", rows=1)))


def test_rows_are_blamed_only_if_the_session_is_sound() -> None:
    sound = answer(ExecutionError("out of range"), unfit=False)
    reason = "raised ExecutionError: out of range"
    assert sound == Failed(worker="worker-1", attempt=3, cause=Cause.ROWS, reason=reason)
    unfit = answer(ExecutionError("device lost"), unfit=True)
    assert unfit == Ended(worker="worker-1", blame=Blame.WORKER, reason="it computes wrongly")
    store = answer(StoreError("the disk is full"), unfit=True)
    assert store == Failed(worker="worker-1", attempt=3, cause=Cause.STORE, reason="the disk is full")


def test_base_exception_becomes_an_outcome() -> None:
    class PanicException(BaseException):
        """As raised by panics of Rust code."""

    found = answer(PanicException("index out of bounds"), unfit=False)
    reason = "raised PanicException: index out of bounds"
    assert found == Failed(worker="worker-1", attempt=3, cause=Cause.ROWS, reason=reason)


def test_actor_computes_a_probe_and_commits_a_unit(worker: Worker, unit: Unit) -> None:
    actor = WorkerActor("worker-1", make_request(Path("in"), Path("out")))
    actor._worker = worker
    before = worker.progress
    probe = Attempt(number=1, unit=unit, probe=Span(start=2, stop=4))
    assert actor.compute(probe) == Survived(worker="worker-1", attempt=1)
    assert worker.progress > before
    attempt = Attempt(number=2, unit=unit, quarantined={3: "hung for 60 s"})
    assert actor.compute(attempt) == Computed(worker="worker-1", attempt=2)
    done = actor.commit(2)
    assert isinstance(done, Done)
    assert (done.report.rows, done.report.errors) == (12, 2)
    assert done.report.quarantined == {"00003.png": "hung for 60 s"}


RIGHT = {"scores": np.array([[1.0, 2.0]], np.float32)}


@dataclass
class Session:
    """Adds `offset` to the right answer, and counts concurrent callers."""

    offset: float = 0.0
    runs: int = 0
    inside: int = 0
    most_inside: int = 0
    outputs: list[object] = field(default_factory=list)

    def run(self, _feeds: dict[str, AnyArray], outputs: object = None) -> dict[str, AnyArray]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        time.sleep(0.001)
        self.runs += 1
        self.outputs.append(outputs)
        self.inside -= 1
        return {"scores": RIGHT["scores"] + self.offset}


def prover(session: Session) -> Prover:
    replay = Replay(session=session, samples=({},), reference=RIGHT, limits=EXPORT)  # type: ignore[arg-type]
    return Prover(replay, ["scores"], threading.Lock())


def test_one_proof_covers_everything_computed_before_it() -> None:
    session = Session()
    proofs = prover(session)
    moment = time.monotonic()
    proofs.prove(moment)
    proofs.prove(moment)
    assert (session.runs, session.outputs) == (2, [("scores",)] * 2), "once at the start"
    proofs.prove(time.monotonic())
    assert session.runs == 3


def test_session_that_is_wrong_from_the_start_is_refused() -> None:
    with pytest.raises(VerificationError):
        prover(Session(offset=0.5))


def test_proofs_use_golden_samples_in_turn() -> None:
    seen: list[int] = []

    class Numbered(Session):
        def run(self, feeds: dict[str, AnyArray], outputs: object = None) -> dict[str, AnyArray]:
            seen.append(int(feeds["number"]))
            return super().run(feeds, outputs)

    samples = tuple({"number": np.array(number)} for number in range(6))
    reference = {"scores": np.repeat(RIGHT["scores"], 6, axis=0)}
    session = Numbered()
    replay = Replay(session=session, samples=samples, reference=reference, limits=EXPORT)  # type: ignore[arg-type]
    proofs = Prover(replay, None, threading.Lock())
    for _ in range(3):
        proofs.prove(time.monotonic())
    assert seen == [*range(6), 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    seen.clear()
    for rows in (1, 48, 250, 100_000):
        proofs.prove(time.monotonic(), rows)
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1], "a sample for a hundred rows, one at least and four at most"


def test_session_that_changes_its_answers_is_unfit() -> None:
    session = Session()
    proofs = prover(session)
    proofs.prove(time.monotonic())
    session.offset = 0.5
    with pytest.raises(WorkerUnfit, match="no longer computes the golden samples"):
        proofs.prove(time.monotonic())


def test_proof_without_samples_succeeds() -> None:
    Prover(None, None, threading.Lock()).prove(time.monotonic())


def test_session_has_one_caller_at_a_time() -> None:
    computing, session = threading.Lock(), Session()
    replay = Replay(session=session, samples=({},), reference=RIGHT, limits=EXPORT)  # type: ignore[arg-type]
    proofs = Prover(replay, None, computing)

    def compute() -> None:
        with computing:
            session.run({})

    threads = [threading.Thread(target=compute) for _ in range(4)]
    threads += [threading.Thread(target=proofs.prove, args=(time.monotonic() + 1,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.most_inside == 1
