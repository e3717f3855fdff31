"""A worker in this process: units with odd rows, a store that is slow to recover."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scoring_runs import make_images, make_request, results

from graphkiln_backend.scoring import worker as module
from graphkiln_backend.scoring.errors import InputChanged, SourceUnavailable, StoreError, UnitUnreadable
from graphkiln_backend.scoring.outcomes import Attempt, Progress, Track
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.units import Unit
from graphkiln_backend.scoring.worker import Worker


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
    monkeypatch.setattr(module, "_COMMIT_WAITS_S", (0.001, 0.001, 0.001))
    yield shared
    shared._destination.remove(list(shared._destination.committed_ids()))


@pytest.fixture
def unit(worker: Worker) -> Unit:
    (found,) = [each.unit("configuration") for each in worker._source.ranges(100)]
    return found


@pytest.fixture
def track() -> Track:
    return Progress.create().track(1)


def test_a_unit_is_scored_once_with_its_errors(worker: Worker, unit: Unit, track: Track, folder: Path) -> None:
    report = worker.score(Attempt(unit=unit), track)
    assert report is not None
    assert (report.rows, report.errors, report.twin) == (12, 1, False)
    again = worker.score(Attempt(unit=unit), track)
    assert again is not None
    assert again.twin
    assert results(folder.parent / "out").num_rows == 12


def test_a_row_that_changed_ends_its_attempt(worker: Worker, unit: Unit, track: Track, folder: Path) -> None:
    path = folder / "00007.png"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        with pytest.raises(InputChanged):
            worker.score(Attempt(unit=unit), track)
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_row_that_can_never_be_read_is_an_error_at_last_where_the_others_can_be(
    worker: Worker, unit: Unit, track: Track, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Where more of them cannot be read, it is the source that is gone: nothing is committed."""

    def fail() -> bytes:
        raise SourceUnavailable("cannot read it: Input/output error")

    rows = [replace(row, load=fail) if n < failing else row for n, row in enumerate(worker._source.rows(unit))]
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(rows), raising=False)
    with pytest.raises(SourceUnavailable):
        worker.score(Attempt(unit=unit), track)
    monkeypatch.setattr(module, "_READ_WAITS_S", (0.0, 0.0))
    if failing > 1:
        with pytest.raises(SourceUnavailable):
            worker.score(Attempt(unit=unit, outages_are_errors=True), track)
        assert list(worker._destination.committed_ids()) == []
        return
    report = worker.score(Attempt(unit=unit, outages_are_errors=True), track)
    assert report is not None
    assert (report.rows, report.errors) == (12, 2), "and one that is no image"
    assert report.example == "cannot read it: Input/output error, again and again"


def test_a_unit_that_lost_rows_is_not_committed(
    worker: Worker, unit: Unit, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(worker._source.rows(unit))
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(rows[:-1]), raising=False)
    with pytest.raises(InputChanged, match="has 11 rows where 12 were planned"):
        worker.score(Attempt(unit=unit), track)
    assert list(worker._destination.committed_ids()) == []


def test_a_unit_that_cannot_be_read_is_told_apart(
    worker: Worker, unit: Unit, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Unit) -> Iterator[Row]:
        raise OSError("torn")
        yield

    monkeypatch.setattr(worker._source, "rows", broken, raising=False)
    with pytest.raises(UnitUnreadable, match="torn"):
        worker.score(Attempt(unit=unit), track)


def test_a_row_that_is_read_at_the_second_attempt_is_answered(
    worker: Worker, unit: Unit, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy store refuses some rows now and then."""
    monkeypatch.setattr(module, "_READ_WAITS_S", (0.0, 0.0))
    rows, refused = list(worker._source.rows(unit)), set()

    def load(row: Row) -> bytes:
        if row.id not in refused:
            refused.add(row.id)
            raise SourceUnavailable("slow down")
        return row.load()

    busy = [replace(row, load=partial(load, row)) for row in rows]
    monkeypatch.setattr(worker._source, "rows", lambda _: iter(busy), raising=False)
    report = worker.score(Attempt(unit=unit, outages_are_errors=True), track)
    assert report is not None
    assert (report.rows, report.errors, len(refused)) == (12, 1, 12)


@pytest.mark.parametrize("passing", [True, False])
def test_a_store_is_given_time_where_that_may_help(
    worker: Worker, unit: Unit, track: Track, monkeypatch: pytest.MonkeyPatch, passing: bool
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
        report = worker.score(Attempt(unit=unit), track)
        assert report is not None
    else:
        with pytest.raises(StoreError):
            worker.score(Attempt(unit=unit), track)
    assert calls == failures + 1
