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
"""Files that were opened, for whoever listens now."""


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _OPENED:
        _OPENED[-1].append(str(arguments[0]))


sys.addaudithook(listen)  # cannot be removed, and does nothing while nobody listens


@contextmanager
def opened() -> Iterator[list[str]]:
    _OPENED.append([])
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()


def test_everything_is_listed_by_instance(tmp_path: Path) -> None:
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


def test_with_many_instances_each_file_is_opened_once_and_a_status_never_again(tmp_path: Path) -> None:
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


def test_nothing_is_kept_of_instances_that_are_gone(tmp_path: Path) -> None:
    reader = SnapshotReader(tmp_path)
    for threads in (1, 2):
        with StatusFile(tmp_path, "m_0", instance_status(threads=threads)):
            assert reader.read().statuses["m_0.1"].threads == threads
        assert reader.read() == Snapshot()


def test_files_that_are_being_written_are_not_read(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "m_0.1.json.tmp").write_text('{"pid": 1, "mo')
    (tmp_path / "m_0.1.counters.tmp").write_bytes(b"\0\0\0")
    assert read_snapshot(tmp_path) == Snapshot()
    assert logged == []


@pytest.mark.parametrize("suffix", ["json", "counters", "fault", "loading"])
def test_a_file_that_vanishes_after_it_was_listed_is_left_out(
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


def test_a_folder_that_is_gone_has_no_instances(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path / "gone") == Snapshot()


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


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a_0.7.json", '{"pid": 1, "colour": "red"}', "unknown key 'colour'"),  # of another release
        ("a_0.7.json", '{"pid": 1, "mo', "a_0.7.json"),  # a full disk cut it short
        ("a_0.7.counters", "cut", "a_0.7.counters"),
    ],
)
def test_a_file_that_cannot_be_read_hides_no_other(
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
    assert seen.ready == ({1, 7} if name.endswith("json") else {1}), "nobody takes it for one that still loads"


def test_the_supervisors_own_file_is_no_status(tmp_path: Path) -> None:
    (tmp_path / "restarts.json").write_text(json.dumps({"instance_died": 1}))
    with StatusFile(tmp_path, "m_0", STATUS):
        assert read_snapshot(tmp_path).statuses == {"m_0.1": STATUS}


def test_whether_an_instance_is_still_ready(tmp_path: Path) -> None:
    with StatusFile(tmp_path, "m_0", STATUS):
        assert is_ready(tmp_path, "m_0.1")
    assert not is_ready(tmp_path, "m_0.1")


def test_the_versions_of_a_model_that_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    assert serving_versions("m") == set()
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    with ExitStack() as stack:
        for name, model, version in (("m_0", "m", 1), ("m_1", "m", 1), ("m_2", "m", 3), ("n_0", "n", 2)):
            stack.enter_context(StatusFile(tmp_path, name, instance_status(model=model, version=version)))
        stack.enter_context(LoadingFile(tmp_path, "m_3", "m", 4))
        assert serving_versions("m") == {1, 3}
