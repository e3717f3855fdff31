"""A worker's process: what it computes, and how it is told that it ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from scoring_runs import PLANTED, make_images, make_request, results

from graphkiln_backend.scoring import worker_process
from graphkiln_backend.scoring.opening import open_source
from graphkiln_backend.scoring.outcomes import Attempt, Blame, Cause, Done, Ended, Failed, Outcome, Ready, Span
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.units import Unit
from graphkiln_backend.scoring.worker_process import NodeMemory, WorkerProcess

_APART = 25
WORDS = [b"segfault", b"stop", b"hang", b"eat", b"raise", b"wrong"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words among images, so far from each other that no unit holds two."""
    planted = {_APART * (index + 1) + 5: word for index, word in enumerate(WORDS)}
    return make_images(tmp_path_factory.mktemp("source") / "images", _APART * (len(WORDS) + 1), planted)


@pytest.fixture
def request_(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScoreRequest:
    monkeypatch.syspath_prepend(str(PLANTED))
    return make_request(images, tmp_path / "out")


def units(request: ScoreRequest) -> list[Unit]:
    return [each.unit("configuration") for each in open_source(request).ranges(10)]


def unit_with(request: ScoreRequest, word: bytes) -> Unit:
    found = {each: [*filter(None, _words(request, each))] for each in units(request)}
    return next(unit for unit, words in found.items() if words == [word.decode()])


def _words(request: ScoreRequest, unit: Unit) -> Iterator[str]:
    for row in open_source(request).rows(unit):
        content = row.load()
        yield content.decode() if content in WORDS else ""


def until(process: WorkerProcess, kind: type[Outcome]) -> Outcome:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for outcome in process.poll(1.0):
            if isinstance(outcome, kind | Ended):
                return outcome
    raise AssertionError("nothing was told")


@pytest.fixture
def process(request_: ScoreRequest) -> Iterator[WorkerProcess]:
    Path(request_.destination).mkdir()
    with WorkerProcess("worker-1", request_, memory_bytes=2**30) as process:
        found = until(process, Ready)
        assert isinstance(found, Ready), found
        yield process


def test_it_proves_itself_scores_and_ends(process: WorkerProcess, request_: ScoreRequest) -> None:
    first = units(request_)[0]
    process.assign(1, Attempt(unit=first, probe=Span(start=2, stop=4)))
    assert until(process, Done) == Done(worker="worker-1", attempt=1, report=None)
    process.assign(2, Attempt(unit=first, quarantined={3: "hung for 60 s"}))
    found = until(process, Done)
    assert isinstance(found, Done)
    assert found.report
    ids = [row.id for row in open_source(request_).rows(first)]
    told = {ids[3]: "hung for 60 s"}
    assert (found.report.rows, found.report.errors, found.report.quarantined) == (first.rows, 1, told)
    table = results(Path(request_.destination))
    assert table.column("id").to_pylist() == sorted(ids)
    assert table.column("error").null_count == first.rows - 1
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


class _Pipe:
    """Takes its time, as a pipe does that is full, and notes who came in between."""

    def __init__(self) -> None:
        self.inside, self.met, self.sent = 0, False, 0

    def send(self, _: object) -> None:
        self.inside += 1
        time.sleep(0.02)
        self.met |= self.inside > 1
        self.inside -= 1
        self.sent += 1


def test_two_units_that_are_assigned_at_one_moment_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray runs two calls of an actor at a time; what they wrote into the pipe would be the message of nobody."""
    ours = object.__new__(WorkerProcess)
    pipe = _Pipe()
    for name, value in {"_running": {}, "_sending": threading.Lock(), "_connection": pipe}.items():
        monkeypatch.setattr(ours, name, value, raising=False)
    attempt = Attempt(unit=Unit(id="0", path="in", part="x", rows=1))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ours.assign(number, attempt), range(4)))
    assert (pipe.sent, pipe.met) == (4, False)
    assert ours._running.keys() == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "reason"), [(b"segfault", "ended its worker with SIGSEGV"), (b"stop", "hung for"), (b"hang", "hung for")]
)
def test_a_row_that_ends_it_is_told_with_where_it_was(
    process: WorkerProcess, request_: ScoreRequest, word: bytes, reason: str
) -> None:
    process.assign(7, Attempt(unit=unit_with(request_, word), patience_s=5.0))  # a busy machine takes a while to begin
    ended = until(process, Ended)
    assert isinstance(ended, Ended)
    assert ended.reason.startswith(reason)
    assert (ended.blame, ended.committing) == (Blame.ROWS, frozenset())
    assert ended.reached[7] > 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.slow
def test_a_row_that_eats_memory_ends_it_when_the_nodes_is_nearly_gone(
    process: WorkerProcess, request_: ScoreRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "node_memory", lambda: NodeMemory(used_bytes=95, total_bytes=100))
    process._memory_bytes = 500 * 2**20
    process.assign(1, Attempt(unit=units(request_)[0]))
    assert isinstance(until(process, Done), Done), "it has less than its share"
    process.assign(2, Attempt(unit=unit_with(request_, b"eat")))
    ended = until(process, Ended)
    assert isinstance(ended, Ended)
    assert "of memory, more than its share of 0.5 GiB" in ended.reason


@pytest.mark.slow
def test_an_error_that_nobody_knows_is_the_rows(process: WorkerProcess, request_: ScoreRequest) -> None:
    process.assign(1, Attempt(unit=unit_with(request_, b"raise")))
    failed = until(process, Failed)
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.reason) == (Cause.ROWS, "raised RecursionError: too deep")


@pytest.mark.slow
def test_a_worker_that_computes_wrongly_writes_nothing(process: WorkerProcess, request_: ScoreRequest) -> None:
    process.assign(1, Attempt(unit=unit_with(request_, b"wrong")))
    ended = until(process, Done)
    assert isinstance(ended, Ended)
    assert ended.blame is Blame.WORKER
    assert "no longer computes the golden samples" in ended.reason
    assert not list(Path(request_.destination).glob("*.parquet"))


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(request_: ScoreRequest, tmp_path: Path) -> None:
    with WorkerProcess("worker-1", replace(request_, model=tmp_path / "none"), memory_bytes=2**30) as process:
        ended = until(process, Ready)
    assert isinstance(ended, Ended)
    assert ended.blame is Blame.WORKER
    assert "it could not start" in ended.reason


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_starts_is_not_the_rows_fault(request_: ScoreRequest) -> None:
    with WorkerProcess("worker-1", request_, memory_bytes=2**30) as process:
        os.kill(process.pid, signal.SIGKILL)
        ended = until(process, Ready)
    assert isinstance(ended, Ended)
    assert ended.blame is Blame.WORKER
    assert "SIGKILL" in ended.reason


@pytest.mark.slow
def test_a_reason_not_to_start_that_nobody_knows_is_told(request_: ScoreRequest) -> None:
    """A library that a node lacks, say."""
    broken = replace(request_, overrides=(object(),))  # type: ignore[arg-type]
    with WorkerProcess("worker-1", broken, memory_bytes=2**30) as process:
        ended = until(process, Ready)
    assert isinstance(ended, Ended)
    assert ended.blame is Blame.WORKER
    assert "exit status 1 while it started" in ended.reason
    assert "AttributeError: 'object' object has no attribute 'key'" in ended.reason
