"""The status files of instances: published whole, read while they come and go."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from statuses import instance_status, read_counters

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.triton import instance_status as module
from graphkiln_backend.triton.instance_status import (
    LoadingFile,
    StatusFile,
    read_faults,
    read_loading,
    read_progress,
    read_statuses,
    report_loading,
)

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


def test_statuses_and_counters_are_listed_by_instance(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name in ("b_0", "a_1", "a_0"):
            stack.enter_context(StatusFile(tmp_path, name, instance_status(model=name)))
        assert [status.model for status in read_statuses(tmp_path)] == ["a_0", "a_1", "b_0"]
        assert list(read_counters(tmp_path)) == ["a_0.1", "a_1.1", "b_0.1"]
    assert read_statuses(tmp_path) == []
    assert read_counters(tmp_path) == {}


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


def test_files_that_are_being_written_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "m_0.1.json.tmp").write_text('{"pid": 1, "mo')
    (tmp_path / "m_0.1.counters.tmp").write_bytes(b"\0\0\0")
    assert read_statuses(tmp_path) == []
    assert read_counters(tmp_path) == {}


@pytest.mark.parametrize("suffix", ["json", "counters"])
def test_a_file_that_vanishes_after_it_was_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*glob(path, pattern), path / f"gone.{suffix}"])
    with StatusFile(tmp_path, "m_0", STATUS):
        if suffix == "json":
            assert read_statuses(tmp_path) == [STATUS]
        else:
            assert read_counters(tmp_path) == {"m_0.1": (0, 0)}


def test_a_folder_that_is_gone_has_no_instances(tmp_path: Path) -> None:
    assert read_statuses(tmp_path / "gone") == []
    assert read_counters(tmp_path / "gone") == {}


def test_instances_come_and_go_while_they_are_read(tmp_path: Path) -> None:
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


def test_a_status_of_another_release_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "m_0.1.json").write_text('{"pid": 1, "colour": "red"}')
    with pytest.raises(ManifestError, match="unknown key 'colour'"):
        read_statuses(tmp_path)


def test_progress_says_since_when_it_computes(tmp_path: Path) -> None:
    before = time.monotonic()
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        idle = read_progress(tmp_path)["m_0.1"]
        assert (idle.begun, idle.ended, idle.begun_at, idle.computing) == (0, 0, 0.0, False)
        assert before <= idle.heartbeat <= time.monotonic()
        begun = time.monotonic()
        with file.computing:
            busy = read_progress(tmp_path)["m_0.1"]
            assert (busy.begun, busy.ended, busy.computing) == (1, 0, True)
            assert begun <= busy.begun_at <= time.monotonic()
        over = read_progress(tmp_path)["m_0.1"]
        assert (over.begun, over.ended, over.begun_at, over.computing) == (1, 1, busy.begun_at, False)


def test_the_heart_beats_while_a_batch_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_EVERY_S", 0.001)
    with StatusFile(tmp_path, "m_0", STATUS) as file, file.computing:
        first = read_progress(tmp_path)["m_0.1"]
        deadline = time.monotonic() + 20
        while (latest := read_progress(tmp_path)["m_0.1"]).heartbeat <= first.heartbeat:
            assert time.monotonic() < deadline
        assert (latest.begun, latest.ended, latest.begun_at) == (first.begun, first.ended, first.begun_at)


def test_a_batch_is_never_seen_with_the_time_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is read is read again."""
    with StatusFile(tmp_path, "m_0", STATUS) as file:
        with file.computing:
            first = read_progress(tmp_path)["m_0.1"]
        contents: list[bytes] = []
        read = Path.read_bytes

        def torn(path: Path) -> bytes:
            content = read(path)
            contents.append(content)
            if len(contents) == 1:
                file.computing.__enter__()
                return content[:8] + read(path)[8:]
            return content

        monkeypatch.setattr(Path, "read_bytes", torn)
        seen = read_progress(tmp_path)["m_0.1"]
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
        assert read_faults(tmp_path) == {}
        file.report_fault("output 'y' differs:\n  3 of 8")
        assert read_faults(tmp_path) == {"m_0.1": "output 'y' differs: 3 of 8"}
    assert list(tmp_path.iterdir()) == []


def test_a_loading_instance_is_listed_until_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    before = time.monotonic()
    with report_loading("m_0", "größe", 7):
        ((name, loading),) = read_loading(tmp_path).items()
        assert name == f"m_0.{os.getpid()}"
        assert (loading.pid, loading.model, loading.version) == (os.getpid(), "größe", 7)
        assert before <= loading.since <= time.monotonic()
        assert read_statuses(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_loading_that_fails_is_no_longer_listed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), LoadingFile(tmp_path, "m_0", "m", 1):
        _ = 1 / 0
    assert read_loading(tmp_path) == {}


def test_without_a_supervisor_loading_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHKILN_RUN_FOLDER", raising=False)
    with report_loading("m_0", "m", 1):
        pass


def test_the_supervisors_own_file_is_no_status(tmp_path: Path) -> None:
    (tmp_path / "restarts.json").write_text(json.dumps({"instance_died": 1}))
    with StatusFile(tmp_path, "m_0", STATUS):
        assert read_statuses(tmp_path) == [STATUS]
