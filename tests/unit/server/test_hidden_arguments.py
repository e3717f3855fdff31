"""Arguments that other users of the machine cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphkiln_backend.server import hidden_arguments as module
from graphkiln_backend.server.hidden_arguments import start_hidden

PRINT = """
import sys
from pathlib import Path
shown = Path("/proc/self/cmdline").read_text().replace("\\0", " ")
Path(sys.argv[1]).write_text("\\n".join([*sys.argv[2:], shown]))
sys.exit(7)
"""
HIDDEN = ["--one:key=s3cret", "--two:key=s3cret"]


def run(output: Path, hidden: list[str] = HIDDEN) -> tuple[list[str], str]:
    """The arguments that a program sees, and those that everybody sees."""
    program = output.with_name("program.py")
    program.write_text(PRINT)
    command = [sys.executable, str(program), str(output), "--first", *hidden, "--last=s"]
    with start_hidden(command, hidden, os.environ, lambda: None) as process:
        assert process.wait(60) == 7
    *seen, shown = output.read_text().splitlines()
    return seen, shown


def test_the_program_gets_them_and_nobody_sees_them(tmp_path: Path) -> None:
    seen, shown = run(tmp_path / "out")
    assert seen == ["--first", *HIDDEN, "--last=s"]
    assert "s3cret" not in shown
    assert "--one:key=*** --two:key=*** --last=s" in shown


def test_nothing_to_hide(tmp_path: Path) -> None:
    assert run(tmp_path / "out", [])[0] == ["--first", "--last=s"]


def test_where_the_system_forbids_it_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbid(*_: int) -> None:
        raise PermissionError("ptrace is forbidden")

    monkeypatch.setattr(module, "_ptrace", forbid)
    seen, shown = run(tmp_path / "out")
    assert seen == ["--first", *HIDDEN, "--last=s"]
    assert "s3cret" in shown
    assert "can read the admin key" in caplog.text


def test_what_cannot_be_changed_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FIRST_FIELD", 0)
    assert run(tmp_path / "out")[0] == ["--first", *HIDDEN, "--last=s"]
    assert "can read the admin key" in caplog.text


def test_a_program_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_hidden([str(tmp_path / "no")], [], os.environ, lambda: None)
    with pytest.raises((FileNotFoundError, subprocess.SubprocessError)):
        start_hidden([str(tmp_path / "no"), *HIDDEN], HIDDEN, os.environ, lambda: None)
