"""Status files of instances, written and read concurrently: snapshots, crash records."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from statuses import instance_status, read_counters, read_statuses

from graphkiln_backend.triton import instance_status as module
from graphkiln_backend.triton import snapshot
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.instance_status import (
    CrashRecord,
    Loading,
    LoadingFile,
    Progress,
    StatusFile,
    describe_crash,
    note_end,
    report_loading,
)
from graphkiln_backend.triton.snapshot import Snapshot, SnapshotReader, is_ready, read_snapshot, serving_versions

STATUS = instance_status()


def test_late_end_of_an_instance_keeps_its_successors_files(tmp_path: Path) -> None:
    successor_status = instance_status(pid=STATUS.pid + 1)
    ending = StatusFile(tmp_path, "m_0", STATUS)
    successor = StatusFile(tmp_path, "m_0", successor_status)
    ending.close()
    assert read_statuses(tmp_path) == [successor_status]
    with successor.computing:
        assert list(read_counters(tmp_path).values()) == [(1, 0)]
    successor.close()


def test_failed_batch_is_counted_as_ended(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    with pytest.raises(ZeroDivisionError), file.computing:
        _ = 1 / 0
    assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
    file.close()


def test_status_round_trip(tmp_path: Path) -> None:
    status = instance_status(
        model="größe",
        nodes={"CPUExecutionProvider": 12},
        products={"fp32": 3, "bf16": 1},
        self_test='relative L2 1.2e-07, "same" top-1',
        self_test_error=1.2e-07,
        fallbacks=2,
    )
    with StatusFile(tmp_path, "größe_0_0", status):
        assert read_statuses(tmp_path) == [status]


def test_counters_exist_before_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: (renamed.append(target.suffix), rename(path, target))[1])
    with StatusFile(tmp_path, "m_0", STATUS):
        assert renamed == [".counters", ".json"]


def test_close_is_idempotent(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    for path in tmp_path.iterdir():
        path.unlink()
    file.close()
    file.close()


def test_progress_of_idle_and_computing_instances(tmp_path: Path) -> None:
    before = time.monotonic()
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        idle = read_snapshot(tmp_path).progress["m_0.1"]
        assert (idle.begun, idle.ended, idle.begun_at, idle.computing) == (0, 0, 0.0, False)
        assert before <= idle.heartbeat <= time.monotonic()
        begun = time.monotonic()
        with file.computing:
            busy = read_snapshot(tmp_path).progress["m_0.1"]
            assert (busy.begun, busy.ended, busy.computing) == (1, 0, True)
            assert begun <= busy.begun_at <= time.monotonic()
        over = read_snapshot(tmp_path).progress["m_0.1"]
        assert (over.begun, over.ended, over.begun_at, over.computing) == (1, 1, busy.begun_at, False)


def test_heartbeat_continues_during_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_EVERY_S", 0.001)
    with StatusFile(tmp_path, "m_0", STATUS) as file, file.computing:
        first = read_snapshot(tmp_path).progress["m_0.1"]
        deadline = time.monotonic() + 20
        while (latest := read_snapshot(tmp_path).progress["m_0.1"]).heartbeat <= first.heartbeat:
            assert time.monotonic() < deadline
        assert (latest.begun, latest.ended, latest.begun_at) == (first.begun, first.ended, first.begun_at)


def test_torn_read_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes during reading is read again."""
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        with file.computing:
            first = read_snapshot(tmp_path).progress["m_0.1"]
        contents: list[bytes] = []
        read = os.pread

        def torn(descriptor: int, size: int, offset: int) -> bytes:
            content = read(descriptor, size, offset)
            contents.append(content)
            if len(contents) == 1:
                file.computing.__enter__()
                return content[:8] + read(descriptor, size, offset)[8:]
            return content

        monkeypatch.setattr(os, "pread", torn)
        seen = Progress.read(tmp_path / "m_0.1.counters")
        assert len(contents) == 3
        assert seen.computing
        assert seen.begun_at > first.begun_at


def test_no_thread_outlives_the_instance(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with StatusFile(tmp_path, "m_0", STATUS):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before


def test_fault_is_published_as_one_line(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        assert read_snapshot(tmp_path).faults == {}
        file.report_fault("output 'y' differs:\n  3 of 8")
        assert read_snapshot(tmp_path).faults == {"m_0.1": "output 'y' differs: 3 of 8"}
    assert list(tmp_path.iterdir()) == []


def test_report_loading_publishes_until_the_end_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    before = time.monotonic()
    with report_loading("m_0", "größe", 7):
        ((name, loading),) = read_snapshot(tmp_path).loading.items()
        assert name == f"m_0.{os.getpid()}"
        assert (loading.pid, loading.model, loading.version) == (os.getpid(), "größe", 7)
        assert before <= loading.since <= time.monotonic()
        assert read_statuses(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_loading_publishes_the_current_step(tmp_path: Path) -> None:
    log = logging.getLogger("graphkiln.lowering")
    with LoadingFile(tmp_path, "m_0", "m", 1):
        (loading,) = read_snapshot(tmp_path).loading.values()
        assert loading.activity == "lowering"
        log.setLevel(logging.INFO)
        log.info("proving %s", "onnxruntime on cpu")
        log.warning("something else")
        (loading,) = read_snapshot(tmp_path).loading.values()
        assert loading.activity == "proving onnxruntime on cpu"
    log.info("later")
    log.setLevel(logging.NOTSET)
    assert list(tmp_path.iterdir()) == []


# Crash records of processes that are killed during loading.

LOADING = Loading(pid=7, model="m", version=2, since=0.0, activity="proving onnxruntime on cpu")
KILLED = """
import os, resource, sys
from graphkiln_backend.triton.instance_status import report_loading
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with report_loading("m_0", "m", 2):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("fatal", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGKILL])
def test_signal_that_kills_a_loading_process_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: signal.Signals
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED, str(int(fatal))], timeout=120, check=False)
    assert done.returncode == -fatal
    (record,) = tmp_path.glob("*.crash")
    crash = describe_crash(LOADING, record.read_text())
    assert f"was killed by {fatal.name}" in crash.what
    assert "proving onnxruntime on cpu" in crash.what
    assert crash.hint


def test_crash_record_is_removed_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    was_on = faulthandler.is_enabled()
    with report_loading("m_0", "m", 2):
        assert sorted(path.suffix for path in tmp_path.iterdir()) == [".crash", ".loading"]
        assert faulthandler.is_enabled()
    assert list(tmp_path.iterdir()) == []
    assert faulthandler.is_enabled() is was_on


def test_end_by_the_supervisor_is_recorded(tmp_path: Path) -> None:
    with CrashRecord(tmp_path / "m_0.7.crash"), CrashRecord(tmp_path / "m_1.8.crash"):
        note_end(tmp_path, 7, "loading m version 2 did not finish within 9 s")
        crash = describe_crash(LOADING, (tmp_path / "m_0.7.crash").read_text())
        assert (tmp_path / "m_1.8.crash").read_text() == ""
    assert str(crash) == "the process that loaded it was ended: loading m version 2 did not finish within 9 s"


def test_snapshot_lists_everything_by_instance(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name in ("b_0", "a_1", "a_0"):
            stack.enter_context(StatusFile(tmp_path, name, instance_status(model=name)))
        stack.enter_context(LoadingFile(tmp_path, "c_0", "c", 1))
        seen = read_snapshot(tmp_path)
        assert list(seen.statuses) == list(seen.progress) == ["a_0.1", "a_1.1", "b_0.1"]
        assert [status.model for status in seen.statuses.values()] == ["a_0", "a_1", "b_0"]
        assert list(seen.loading) == [f"c_0.{os.getpid()}"]
        assert seen.ready == {1}
    assert read_snapshot(tmp_path) == Snapshot()


def test_removed_instances_are_forgotten(tmp_path: Path) -> None:
    reader = SnapshotReader(tmp_path)
    for threads in (1, 2):
        with StatusFile(tmp_path, "m_0", instance_status(threads=threads)):
            assert reader.read().statuses["m_0.1"].threads == threads
        assert reader.read() == Snapshot()


def test_temporary_files_are_ignored(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "m_0.1.json.tmp").write_text('{"pid": 1, "mo')
    (tmp_path / "m_0.1.counters.tmp").write_bytes(b"\0\0\0")
    assert read_snapshot(tmp_path) == Snapshot()
    assert logged == []


@pytest.mark.parametrize("suffix", ["json", "counters", "fault", "loading"])
def test_file_removed_after_the_listing_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], suffix: str
) -> None:
    find = snapshot._list
    gone = tmp_path / f"gone.2.{suffix}"

    def find_and_remove(folder: Path) -> object:
        found = find(folder)
        gone.unlink()
        return found

    gone.touch()
    monkeypatch.setattr(snapshot, "_list", find_and_remove)
    with StatusFile(tmp_path, "m_0", STATUS):
        seen = read_snapshot(tmp_path)
    assert seen.statuses == {"m_0.1": STATUS}
    assert list(seen.progress) == ["m_0.1"]
    assert (seen.loading, seen.faults, logged) == ({}, {}, [])


def test_removed_folder_is_an_empty_snapshot(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path / "gone") == Snapshot()


def test_concurrent_publishing(tmp_path: Path) -> None:
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            with StatusFile(tmp_path, "m_0", STATUS) as file, file.computing:
                pass

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come_and_go)
        for _ in range(300):
            assert read_statuses(tmp_path) in ([], [STATUS])
            assert read_counters(tmp_path).get("m_0.1", (0, 0)) in {(0, 0), (1, 0), (1, 1)}
        over.set()
        coming.result()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a_0.7.json", '{"pid": 1, "colour": "red"}', "unknown key 'colour'"),  # of another release
        ("a_0.7.json", '{"pid": 1, "mo', "a_0.7.json"),  # a full disk cut it short
        ("a_0.7.counters", "cut", "a_0.7.counters"),
    ],
)
def test_unreadable_file_is_skipped_and_logged_once(
    tmp_path: Path, logged: list[str], name: str, content: str, why: str
) -> None:
    (tmp_path / name).write_text(content)
    reader = SnapshotReader(tmp_path)
    with StatusFile(tmp_path, "m_0", STATUS):
        for _ in range(2):
            seen = reader.read()
            assert (list(seen.statuses), list(seen.progress)) == (["m_0.1"], ["m_0.1"])
    (line,) = logged
    assert why in line
    assert seen.ready == ({1, 7} if name.endswith("json") else {1}), "not taken for an instance that is still loading"


def test_is_ready(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS):
        assert is_ready(tmp_path, "m_0.1")
    assert not is_ready(tmp_path, "m_0.1")


def test_serving_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    assert serving_versions("m") == set()
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    with ExitStack() as stack:
        for name, model, version in (("m_0", "m", 1), ("m_1", "m", 1), ("m_2", "m", 3), ("n_0", "n", 2)):
            stack.enter_context(StatusFile(tmp_path, name, instance_status(model=model, version=version)))
        stack.enter_context(LoadingFile(tmp_path, "m_3", "m", 4))
        assert serving_versions("m") == {1, 3}
