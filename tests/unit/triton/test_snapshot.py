"""What all instances say at one moment, read while they come and go."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from statuses import instance_status, read_counters, read_statuses

from graphkiln_backend.triton import snapshot as module
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.instance_status import LoadingFile, StatusFile
from graphkiln_backend.triton.snapshot import Snapshot, SnapshotReader, is_ready, read_snapshot, serving_versions

STATUS = instance_status()
_OPENED: list[list[str]] = []
"""Files that were opened, one list per listener."""


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _OPENED:
        _OPENED[-1].append(str(arguments[0]))


sys.addaudithook(listen)  # cannot be removed


@contextmanager
def opened() -> Iterator[list[str]]:
    _OPENED.append([])
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()


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


def test_statuses_are_read_once_and_counters_each_time(tmp_path: Path) -> None:
    names = [f"model_{number}_0" for number in range(40)]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(StatusFile(tmp_path, name, STATUS))
        reader = SnapshotReader(tmp_path)
        with opened() as first:
            seen = reader.read()
        with opened() as second:
            assert reader.read() == seen
    counters = [str(tmp_path / f"{name}.1.counters") for name in names]
    assert sorted(first) == sorted([*counters, *(str(tmp_path / f"{name}.1.json") for name in names)])
    assert sorted(second) == sorted(counters)


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
    find = module._list
    gone = tmp_path / f"gone.2.{suffix}"

    def find_and_remove(folder: Path) -> object:
        found = find(folder)
        gone.unlink()
        return found

    gone.touch()
    monkeypatch.setattr(module, "_list", find_and_remove)
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


def test_restarts_file_is_not_a_status(tmp_path: Path) -> None:
    (tmp_path / "restarts.json").write_text(json.dumps({"instance_died": 1}))
    with StatusFile(tmp_path, "m_0", STATUS):
        assert read_snapshot(tmp_path).statuses == {"m_0.1": STATUS}


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
