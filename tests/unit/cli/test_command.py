"""The entry point of the command: signals, encoding and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from graphkiln.cli.command import main

pytestmark = pytest.mark.alone


@pytest.fixture
def _stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command receives SIGTERM immediately."""
    module = ModuleType("graphkiln.cli.main")
    module.main = lambda: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphkiln.cli.main", module)


@pytest.mark.usefixtures("_stopped_at_once")
def test_serve_ends_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "serve", "--model-store", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.usefixtures("_stopped_at_once")
def test_other_verbs_do_not_handle_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "convert", "serve"])
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]


def test_ctrl_c_during_import(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("graphkiln.cli.main")
    module.__getattr__ = lambda _: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphkiln.cli.main", module)
    monkeypatch.setattr(sys, "argv", ["graphkiln", "convert"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_non_ascii_file_name_in_ascii_locale(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "graphkiln.cli", "inspect", str(tmp_path / "mödel")]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "mödel" in ended.stderr.decode()


def test_inherited_signal_settings_are_reset(tmp_path: Path) -> None:
    """The parent process ignores SIGCHLD and blocks SIGTERM."""
    program = (
        "import os, signal, subprocess, sys\n"
        "if sys.argv[1:]:\n"
        "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "    os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])\n"
        "from graphkiln.cli.command import reset_signals\n"
        "reset_signals()\n"
        "child = subprocess.run(['sh', '-c', 'kill -9 $$'])\n"
        "print(child.returncode, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    command = [sys.executable, "-c", program, program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60)
    assert (ended.stdout, ended.returncode) == ("-9\n", -signal.SIGTERM)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_redirected(tmp_path: Path, closed: str) -> None:
    """Files do not get their descriptors, and children inherit them."""
    program = (
        "import subprocess, sys; from pathlib import Path; from graphkiln.cli.command import open_closed_streams\n"
        "open_closed_streams()\n"
        "with Path(sys.argv[1]).open('w') as file:\n"
        "    print('lost', flush=True); print('lost', file=sys.stderr, flush=True); sys.stdin.read()\n"
        "    subprocess.run(['sh', '-c', 'echo lost; echo lost >&2'], check=True)\n"
        "    file.write(f'{file.fileno() > 2}')\n"
    )
    shell = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, program, str(tmp_path / "file")]
    subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "True"
