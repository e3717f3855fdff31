"""The status files of instances: published whole, read while they come and go."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
from statuses import instance_status, read_counters, read_statuses

from graphkiln_backend.triton import instance_status as module
from graphkiln_backend.triton.instance_status import (
    LoadingFile,
    Progress,
    StatusFile,
    report_loading,
)
from graphkiln_backend.triton.snapshot import read_snapshot

STATUS = instance_status()


def test_counts_what_is_computing(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    assert read_statuses(tmp_path) == [STATUS]
    with file.computing:
        assert read_counters(tmp_path) == {"m_0.1": (1, 0)}
    assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_an_instance_that_ends_late_leaves_its_successor_alone(tmp_path: Path) -> None:
    successor_status = instance_status(pid=STATUS.pid + 1)
    ending = StatusFile(tmp_path, "m_0", STATUS)
    successor = StatusFile(tmp_path, "m_0", successor_status)
    ending.close()
    assert read_statuses(tmp_path) == [successor_status]
    with successor.computing:
        assert list(read_counters(tmp_path).values()) == [(1, 0)]
    successor.close()


def test_a_failed_batch_is_over_too(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    with pytest.raises(ZeroDivisionError), file.computing:
        _ = 1 / 0
    assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
    file.close()


def test_publishes_nothing_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHKILN_RUN_FOLDER", raising=False)
    assert StatusFile.publish("m_0", STATUS) is None


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
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


def test_batches_are_counted_over_a_byte(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        for _ in range(300):
            with file.computing:
                pass
        with file.computing:
            assert read_counters(tmp_path) == {"m_0.1": (301, 300)}


def test_one_instance_computes_while_another_is_idle(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS) as busy, StatusFile(tmp_path, "m_1", STATUS), busy.computing:
        assert read_counters(tmp_path) == {"m_0.1": (1, 0), "m_1.1": (0, 0)}


def test_the_counters_are_there_before_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: (renamed.append(target.suffix), rename(path, target))[1])
    with StatusFile(tmp_path, "m_0", STATUS):
        assert renamed == [".counters", ".json"]


def test_closing_twice_and_after_the_folder_is_gone_is_no_error(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    for path in tmp_path.iterdir():
        path.unlink()
    file.close()
    file.close()


def test_publishes_into_the_supervisors_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    file = StatusFile.publish("m_0", STATUS)
    assert file is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m_0.1.counters", "m_0.1.json"]
    file.close()


def test_progress_says_since_when_it_computes(tmp_path: Path) -> None:
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


def test_the_heart_beats_while_a_batch_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_EVERY_S", 0.001)
    with StatusFile(tmp_path, "m_0", STATUS) as file, file.computing:
        first = read_snapshot(tmp_path).progress["m_0.1"]
        deadline = time.monotonic() + 20
        while (latest := read_snapshot(tmp_path).progress["m_0.1"]).heartbeat <= first.heartbeat:
            assert time.monotonic() < deadline
        assert (latest.begun, latest.ended, latest.begun_at) == (first.begun, first.ended, first.begun_at)


def test_a_batch_is_never_seen_with_the_time_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is read is read again."""
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


def test_a_fault_is_one_line_until_the_instance_ends(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        assert read_snapshot(tmp_path).faults == {}
        file.report_fault("output 'y' differs:\n  3 of 8")
        assert read_snapshot(tmp_path).faults == {"m_0.1": "output 'y' differs: 3 of 8"}
    assert list(tmp_path.iterdir()) == []


def test_a_loading_instance_is_listed_until_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    before = time.monotonic()
    with report_loading("m_0", "größe", 7):
        ((name, loading),) = read_snapshot(tmp_path).loading.items()
        assert name == f"m_0.{os.getpid()}"
        assert (loading.pid, loading.model, loading.version) == (os.getpid(), "größe", 7)
        assert before <= loading.since <= time.monotonic()
        assert read_statuses(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_loading_that_fails_is_no_longer_listed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), LoadingFile(tmp_path, "m_0", "m", 1):
        _ = 1 / 0
    assert read_snapshot(tmp_path).loading == {}


def test_without_a_supervisor_loading_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHKILN_RUN_FOLDER", raising=False)
    with report_loading("m_0", "m", 1):
        pass


def test_a_loading_instance_says_what_it_does(tmp_path: Path) -> None:
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
