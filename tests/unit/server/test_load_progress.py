"""One row for each version, of its slowest instance."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from statuses import instance_status

from graphkiln_backend.server.load_progress import ExplainingControl, explain, find_crashes, load_progress
from graphkiln_backend.server.repository_control import LoadOverride, VersionState
from graphkiln_backend.triton.instance_status import Loading
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot


def loading(model: str, version: int, seconds: float, activity: str = "lowering") -> Loading:
    return Loading(pid=1, model=model, version=version, since=time.monotonic() - seconds, activity=activity)


def test_nothing_is_loaded_yet() -> None:
    assert load_progress(Snapshot()) == []


def test_versions_by_name_and_number() -> None:
    seen = Snapshot(
        statuses={"a.1": instance_status(model="b", version=3, load_ms=1500.0)},
        loading={"c.2": loading("b", 10, 5, "proving"), "d.3": loading("a", 1, 1)},
    )
    rows = load_progress(seen)
    assert [(row.model, row.version, row.activity) for row in rows] == [
        ("a", 1, "lowering"),
        ("b", 3, "ready"),
        ("b", 10, "proving"),
    ]
    assert rows[1].seconds == 1.5
    assert 5 <= rows[2].seconds < 60
    assert [row.is_ready for row in rows] == [False, True, False]


def test_one_is_ready_when_all_of_its_instances_are() -> None:
    ready = {"m_0.1": instance_status(model="m", version=1, load_ms=90.0)}
    seen = Snapshot(statuses=ready, loading={"m_1.2": loading("m", 1, 2), "m_2.3": loading("m", 1, 7)})
    (row,) = load_progress(seen)
    assert not row.is_ready
    assert row.seconds > 6
    both = {**ready, "m_1.2": instance_status(model="m", version=1, load_ms=900.0)}
    assert [row.seconds for row in load_progress(Snapshot(statuses=both))] == [0.9]


def test_one_whose_process_was_killed_says_so() -> None:
    gone = Loading(pid=2**22 + 1, model="m", version=1, since=time.monotonic(), activity="proving")
    seen = Snapshot(loading={"m_0.1": gone}, crashes={"m_0.1": "Fatal Python error: Segmentation fault\n"})
    (row,) = load_progress(seen)
    assert row.activity == "the process that loaded it was killed by SIGSEGV while it did this: proving"
    assert not row.is_ready


# Triton's "not healthy" becomes what killed the process.

GONE = 2**22 + 1
"""More than the kernel ever gives: no such process. Source: proc(5), `pid_max`."""
REASON = "Internal: Stub process 'm_0_0' is not healthy."


def state(reason: str = REASON, version: str = "2") -> VersionState:
    return VersionState(model="m", version=version, state="UNAVAILABLE", reason=reason)


def loading_of_load_crashes(
    folder: Path, pid: int, since: float = 1.0, record: str | None = "Fatal Python error: Aborted"
) -> None:
    text = f'{{"pid": {pid}, "model": "m", "version": 2, "since": {since}, "activity": "lowering"}}'
    (folder / f"m_0.{pid}.loading").write_text(text)
    if record is not None:
        (folder / f"m_0.{pid}.crash").write_text(record)


def test_the_words_of_whoever_died(tmp_path: Path) -> None:
    loading_of_load_crashes(tmp_path, GONE)
    (told,) = explain([state()], tmp_path)
    assert "was killed by SIGABRT while it did this: lowering" in told.reason
    assert "not healthy" not in told.reason


def test_the_newest_of_several(tmp_path: Path) -> None:
    loading_of_load_crashes(tmp_path, GONE, since=2.0, record="Fatal Python error: Bus error")
    loading_of_load_crashes(tmp_path, GONE + 1, since=1.0)
    assert "SIGBUS" in find_crashes(read_snapshot(tmp_path))["m", 2].what


@pytest.mark.parametrize("reason", ["unloaded", "Internal: no such file"])
def test_another_reason_stays(tmp_path: Path, reason: str) -> None:
    loading_of_load_crashes(tmp_path, GONE)
    assert explain([state(reason)], tmp_path) == [state(reason)]


def test_of_a_process_that_lives_nothing_is_said(tmp_path: Path) -> None:
    loading_of_load_crashes(tmp_path, os.getpid())
    assert find_crashes(read_snapshot(tmp_path)) == {}
    assert explain([state(), state(version="")], tmp_path) == [state(), state(version="")]


@dataclass
class Control:
    said: list[str] = field(default_factory=list)

    def index(self) -> list[VersionState]:
        return [state()]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        self.said.append(f"load {model} {timeout_s} {override}")
        return "no"

    def unload(self, model: str) -> None:
        self.said.append(f"unload {model}")


def test_a_control_that_explains(tmp_path: Path) -> None:
    loading_of_load_crashes(tmp_path, GONE, record=None)
    inner = Control()
    control = ExplainingControl(inner, tmp_path)
    assert "killed by SIGKILL or by itself" in control.index()[0].reason
    assert control.load("m", 3.0) == "no"
    control.unload("m")
    assert inner.said == ["load m 3.0 None", "unload m"]
