"""Triton's "not healthy" becomes what killed the process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from graphkiln_backend.server.load_progress import ExplainingControl, explain, find_crashes
from graphkiln_backend.server.repository_control import LoadOverride, VersionState
from graphkiln_backend.triton.snapshot import read_snapshot

GONE = 2**22 + 1
"""More than the kernel ever gives: no such process. Source: proc(5), `pid_max`."""
REASON = "Internal: Stub process 'm_0_0' is not healthy."


def state(reason: str = REASON, version: str = "2") -> VersionState:
    return VersionState(model="m", version=version, state="UNAVAILABLE", reason=reason)


def loading(folder: Path, pid: int, since: float = 1.0, record: str | None = "Fatal Python error: Aborted") -> None:
    text = f'{{"pid": {pid}, "model": "m", "version": 2, "since": {since}, "activity": "lowering"}}'
    (folder / f"m_0.{pid}.loading").write_text(text)
    if record is not None:
        (folder / f"m_0.{pid}.crash").write_text(record)


def test_the_words_of_whoever_died(tmp_path: Path) -> None:
    loading(tmp_path, GONE)
    (told,) = explain([state()], tmp_path)
    assert "was killed by SIGABRT while it did this: lowering" in told.reason
    assert "not healthy" not in told.reason


def test_the_newest_of_several(tmp_path: Path) -> None:
    loading(tmp_path, GONE, since=2.0, record="Fatal Python error: Bus error")
    loading(tmp_path, GONE + 1, since=1.0)
    assert "SIGBUS" in find_crashes(read_snapshot(tmp_path))["m", 2].what


@pytest.mark.parametrize("reason", ["unloaded", "Internal: no such file"])
def test_another_reason_stays(tmp_path: Path, reason: str) -> None:
    loading(tmp_path, GONE)
    assert explain([state(reason)], tmp_path) == [state(reason)]


def test_of_a_process_that_lives_nothing_is_said(tmp_path: Path) -> None:
    loading(tmp_path, os.getpid())
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
    loading(tmp_path, GONE, record=None)
    inner = Control()
    control = ExplainingControl(inner, tmp_path)
    assert "killed by SIGKILL or by itself" in control.index()[0].reason
    assert control.load("m", 3.0) == "no"
    control.unload("m")
    assert inner.said == ["load m 3.0 None", "unload m"]
