"""Whole runs on this machine: poison rows, resume, stale results, two drivers, signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scoring_runs import PLANTED, REPOSITORY, check_each_once, make_images, make_request, results

from graphkiln.scoring.run_state import RunState
from graphkiln_backend.scoring import driver as run
from graphkiln_backend.scoring import fleet, schedule
from graphkiln_backend.scoring.errors import DestinationBusy, ScoringError
from graphkiln_backend.scoring.messages import (
    Event,
    RowQuarantined,
    RunFinished,
    RunPlanned,
    ScoreRequest,
    UnitCommitted,
    WorkerEnded,
    WorkerReady,
)
from graphkiln_backend.scoring.schedule import Schedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

PROGRAM = """
import pickle, sys
from graphkiln_backend.scoring.errors import RunInterrupted
from graphkiln_backend.scoring.messages import UnitCommitted
from graphkiln_backend.scoring.driver import score_data_set

def report(event):
    if isinstance(event, UnitCommitted):
        print("committed", flush=True)

if __name__ == "__main__":
    try:
        score_data_set(pickle.loads(bytes.fromhex(sys.argv[1])), report)
    except RunInterrupted as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a file for each worker that a planted row has stopped. All workers have the planted faults."""
    folder = tmp_path / "planted"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{PLANTED}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("GRAPHKILN_PLANTED", str(folder))
    return folder


@pytest.fixture
def events() -> list[Event]:
    return []


def start(request: ScoreRequest, program: str = PROGRAM) -> subprocess.Popen[str]:
    import pickle

    command = [sys.executable, "-c", program, pickle.dumps(request).hex()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def score(request: ScoreRequest, events: list[Event] | None = None) -> RunState:
    """Run a request; return its figures."""
    state = RunState()

    def report(event: Event) -> None:
        state.observe(event)
        if events is not None:
            events.append(event)

    run.score_data_set(request, report)
    return state


def planned(state: RunState) -> RunPlanned:
    assert state.plan
    return state.plan


def scored(state: RunState) -> tuple[int, int, int]:
    """Rows, answered rows, rows with an error."""
    return state.rows, state.rows - state.errors, state.errors


def test_every_row_is_answered_once_and_a_second_run_does_nothing(tmp_path: Path, events: list[Event]) -> None:
    request = make_request(make_images(tmp_path / "in", 45, {7: b"no image"}), tmp_path / "out")
    assert scored(score(request, events)) == (45, 44, 1)
    assert check_each_once(tmp_path / "out", 45).keys() == {"00007.png"}
    assert isinstance(events[0], RunPlanned)
    assert isinstance(events[-1], RunFinished)
    again = score(request)
    assert planned(again).done_units == planned(again).units
    assert again.rows == 0


def test_poison_rows_are_quarantined_and_others_scored(
    tmp_path: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hang timeout is short only while a planted row has stopped the only worker: a busy machine is no hang."""

    def hang_timeout_s(*_: object) -> float:
        return 1.0 if any(planted.iterdir()) else schedule.FIRST_HANG_TIMEOUT_S

    monkeypatch.setattr(Schedule, "hang_timeout_s", hang_timeout_s)
    monkeypatch.setattr(fleet, "_HEARTBEAT_S", 0.25)
    rows = dict.fromkeys(range(0, 60, 10), b"no image")
    rows |= {13: b"segfault", 27: b"hang", 38: b"raise", 52: b"stop"}
    request = make_request(make_images(tmp_path / "in", 60, rows), tmp_path / "out", rows_per_unit=20, workers=1)
    state, quarantined = RunState(), []

    def report(event: Event) -> None:
        state.observe(event)
        if isinstance(event, WorkerEnded):
            for stopped in planted.iterdir():
                stopped.unlink()
        if isinstance(event, RowQuarantined):
            quarantined.append(event)

    run.score_data_set(request, report)
    errors = check_each_once(tmp_path / "out", 60)
    assert errors["00013.png"] == f"its worker {fleet.CRASHED}"
    assert errors["00027.png"].startswith("its worker hung for ")
    assert errors["00052.png"].startswith("its worker hung for ")
    assert errors["00038.png"] == "its worker raised RecursionError: too deep"
    assert errors.keys() == {f"{number:05}.png" for number in rows}
    assert (scored(state), state.quarantined_rows) == ((60, 50, 10), 4)
    assert len(quarantined) == 4


def test_image_that_can_never_be_read_becomes_an_error(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MAX_DELAY_S", 0.0)
    request = make_request(make_images(tmp_path / "in", 30, {7: b"no disk"}), tmp_path / "out", rows_per_unit=100)
    assert scored(score(request, events)) == (30, 29, 1)
    errors = check_each_once(tmp_path / "out", 30)
    assert errors == {"00007.png": "cannot read it: Input/output error, again and again"}
    assert not any(isinstance(each, WorkerEnded) for each in events)


def make_tables(folder: Path) -> Path:
    """Two Parquet files of ten images each."""
    made = make_images(folder.with_name("images"), 20)
    folder.mkdir()
    images = [path.read_bytes() for path in sorted(made.iterdir())]
    for name, part in (("a", images[:10]), ("b", images[10:])):
        pq.write_table(pa.table({"image": part}), folder / f"{name}.parquet", row_group_size=5, use_dictionary=False)
    return folder


def test_damaged_row_group_affects_only_its_rows(tmp_path: Path) -> None:
    tables = make_tables(tmp_path / "in")
    offset = pq.read_metadata(tables / "b.parquet").row_group(1).column(0).data_page_offset
    content = bytearray((tables / "b.parquet").read_bytes())
    content[offset : offset + 8] = bytes(8)
    (tables / "b.parquet").write_bytes(content)
    assert scored(score(make_request(tables, tmp_path / "out"))) == (20, 15, 5)
    rows = results(tmp_path / "out").to_pylist()
    assert {row["id"] for row in rows if row["error"]} == {f"b.parquet:{number}" for number in range(5, 10)}
    assert all("b.parquet is damaged in row group 1, starting at row 5" in row["error"] for row in rows if row["error"])
    assert len({row["id"] for row in rows}) == 20


def test_missing_input_fails_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    tables = make_tables(tmp_path / "in")
    request = make_request(tables, tmp_path / "out")

    def take_away(event: Event) -> None:
        if isinstance(event, RunPlanned):
            (tables / "b.parquet").rename(tmp_path / "b.parquet")

    with pytest.raises(ScoringError, match=r"1 units \(10 rows\) have no result: unit [0-9a-f]{32} of .*/b\.parquet: "):
        run.score_data_set(request, take_away)
    assert results(tmp_path / "out").num_rows == 10
    (tmp_path / "b.parquet").rename(tables / "b.parquet")
    state = score(request)
    assert (planned(state).done_units, scored(state)) == (1, (10, 10, 0))
    assert results(tmp_path / "out").num_rows == 20


def test_unfit_worker_writes_nothing_and_is_replaced(tmp_path: Path, events: list[Event]) -> None:
    """The planted row makes every worker unfit, until the node is not used any more."""
    request = make_request(make_images(tmp_path / "in", 30, {25: b"wrong"}), tmp_path / "out", workers=1)
    with pytest.raises(ScoringError, match=r"no node can take part: .*3 of its workers failed: it no longer computes"):
        run.score_data_set(request, events.append)
    assert all(each.unfit for each in events if isinstance(each, WorkerEnded))
    right = make_images(tmp_path / "right", 30)
    (tmp_path / "in" / "00025.png").write_bytes((right / "00025.png").read_bytes())
    run.score_data_set(replace(request, replace=True))
    run.score_data_set(make_request(right, tmp_path / "expected"))

    def scores(folder: str) -> list[object]:
        files = [each for each in (tmp_path / folder).glob("*.parquet") if each.name[0] != "_"]
        rows = [row for each in files for row in pq.read_table(each).to_pylist()]
        return [(row["id"], row["scores"]) for row in sorted(rows, key=lambda row: row["id"])]

    assert scores("out") == scores("expected")


def test_changed_input_needs_replace(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", 30)
    request = make_request(folder, tmp_path / "out")
    run.score_data_set(request)
    (folder / "00004.png").unlink()
    with pytest.raises(ScoringError, match="--replace"):
        run.score_data_set(request)
    (folder / "00004.png").write_bytes((folder / "00005.png").read_bytes())
    run.score_data_set(replace(request, replace=True))
    assert check_each_once(tmp_path / "out", 30) == {}


def test_results_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", 10)
    run.score_data_set(make_request(folder, tmp_path / "out"))
    with pytest.raises(ScoringError, match="another model"):
        run.score_data_set(make_request(folder, tmp_path / "out", top_k=3, replace=True))


def test_removed_version_fails_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    model = shutil.copytree(REPOSITORY / "model_repository" / "digits", tmp_path / "store" / "digits")
    made = make_request(make_images(tmp_path / "in", 200), tmp_path / "out", rows_per_unit=4, workers=1)
    request, pids = replace(made, model=model), set[int]()

    def remove(event: Event) -> None:
        if isinstance(event, WorkerReady):
            pids.add(event.facts.pid)
        if isinstance(event, UnitCommitted) and (model / "1").exists():
            (model / "1").rename(tmp_path / "away")
            os.kill(pids.pop(), signal.SIGKILL)

    with pytest.raises(ScoringError, match=r"no node can take part: .*it could not start: .*digits"):
        run.score_data_set(request, remove)
    (tmp_path / "away").rename(model / "1")
    assert 0 < planned(score(request)).done_units < 50
    assert check_each_once(tmp_path / "out", 200) == {}


def test_second_driver_is_refused(tmp_path: Path) -> None:
    request = make_request(make_images(tmp_path / "in", 400), tmp_path / "out", rows_per_unit=4)
    first = start(request)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "committed\n"
        with pytest.raises(DestinationBusy, match=f"{first.pid}"):
            run.score_data_set(request)
    finally:
        first.communicate(timeout=120)
    assert first.returncode == 0
    check_each_once(tmp_path / "out", 400)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_interrupted_run_can_be_resumed(tmp_path: Path, number: int, status: int) -> None:
    request = make_request(make_images(tmp_path / "in", 600), tmp_path / "out", rows_per_unit=4)
    first = start(request)
    assert first.stdout is not None
    assert first.stdout.readline() == "committed\n"
    below = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(number)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == status
    assert (status < 0) or "run the same command to go on" in output
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == [], "nothing is left running"
    state = score(request)
    assert 0 < planned(state).done_units < planned(state).units
    assert check_each_once(tmp_path / "out", 600) == {}


@pytest.mark.timeout(600)
def test_repeated_ctrl_c_does_not_disturb_the_cleanup(tmp_path: Path) -> None:
    noting = PROGRAM.replace(", report)", ", report, lambda *_: print('notes written', flush=True))")
    request = make_request(make_images(tmp_path / "in", 600), tmp_path / "out", rows_per_unit=4)
    first = start(request, f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{noting}")
    assert first.stdout is not None
    assert first.stdout.readline() == "committed\n"
    below = psutil.Process(first.pid).children(recursive=True)
    deadline = time.monotonic() + 240
    while first.poll() is None and time.monotonic() < deadline:
        first.send_signal(signal.SIGINT)
        time.sleep(0.02)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 130, output
    assert output.splitlines()[-2] == "notes written"
    assert "ended by SIGINT" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == [], "nothing is left running"


def test_a_run_leaves_no_files_and_starts_no_ray(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "t").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "t")}
    import pickle

    request = make_request(make_images(tmp_path / "in", 5), tmp_path / "out")
    command = [sys.executable, "-c", PROGRAM, pickle.dumps(request).hex()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=True)
    assert (done.stdout, done.stderr) == ("committed\n" * done.stdout.count("\n"), "")
    assert list((tmp_path / "t").iterdir()) == []
    assert list((tmp_path / "home").iterdir()) == []
