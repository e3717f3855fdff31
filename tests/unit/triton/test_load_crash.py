"""What kills a process while it loads is recorded, and told in words."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.instance_status import CrashRecord, Loading, describe_crash, note_end, record_crash

LOADING = Loading(pid=7, model="m", version=2, since=0.0, activity="proving onnxruntime on cpu")
KILLED = """
import os, resource, sys
from graphkiln_backend.triton.instance_status import record_crash
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with record_crash("m_0"):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "fatal", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL]
)
def test_a_process_that_a_signal_kills_leaves_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: signal.Signals
) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED, str(int(fatal))], timeout=120, check=False)
    assert done.returncode == -fatal
    (record,) = tmp_path.iterdir()
    told = describe_crash(LOADING, record.read_text())
    assert f"was killed by {fatal.name}" in told.what
    assert "proving onnxruntime on cpu" in told.what
    assert told.hint


def test_nothing_is_left_of_a_process_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    was_on = faulthandler.is_enabled()
    with record_crash("m_0"):
        assert [path.suffix for path in tmp_path.iterdir()] == [".crash"]
        assert faulthandler.is_enabled()
    assert list(tmp_path.iterdir()) == []
    assert faulthandler.is_enabled() is was_on


def test_without_a_supervisor_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    with record_crash("m_0") as record:
        assert record is None


def test_what_was_ended_on_purpose_says_why(tmp_path: Path) -> None:
    with CrashRecord(tmp_path / "m_0.7.crash"), CrashRecord(tmp_path / "m_1.8.crash"):
        note_end(tmp_path, 7, "loading m version 2 did not finish within 9 s")
        told = describe_crash(LOADING, (tmp_path / "m_0.7.crash").read_text())
        assert (tmp_path / "m_1.8.crash").read_text() == ""
    assert str(told) == "the process that loaded it was ended: loading m version 2 did not finish within 9 s"
