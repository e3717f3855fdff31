"""The first moments of the command."""

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
    """The command gets a signal before it does anything."""
    module = ModuleType("graphkiln.cli.main")
    module.main = lambda: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphkiln.cli.main", module)


@pytest.mark.usefixtures("_stopped_at_once")
def test_a_server_ends_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "serve", "--model-store", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.usefixtures("_stopped_at_once")
def test_other_verbs_end_as_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "convert", "serve"])
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]


def test_ctrl_c_while_the_verbs_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("graphkiln.cli.main")
    module.__getattr__ = lambda _: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphkiln.cli.main", module)
    monkeypatch.setattr(sys, "argv", ["graphkiln", "convert"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_name_of_a_file_that_is_not_ascii_where_python_reads_it_as_ascii(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "graphkiln.cli", "inspect", str(tmp_path / "mödel")]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "mödel" in ended.stderr.decode()


def test_signals_are_heard_whatever_the_parent_did(tmp_path: Path) -> None:
    """Whoever started us ignores the ends of children, and has blocked the signals that end us."""
    program = (
        "import os, signal, subprocess, sys\n"
        "if sys.argv[1:]:\n"
        "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "    os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])\n"
        "from graphkiln.cli.command import hear_signals\n"
        "hear_signals()\n"
        "child = subprocess.run(['sh', '-c', 'kill -9 $$'])\n"
        "print(child.returncode, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    command = [sys.executable, "-c", program, program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60)
    assert (ended.stdout, ended.returncode) == ("-9\n", -signal.SIGTERM)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(tmp_path: Path, closed: str) -> None:
    """What is opened next does not get their numbers, and what is started has them, too."""
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
