"""What a search that was killed left is ended and removed; what lives is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from graphkiln.tuning import tuner as module
from graphkiln.tuning.tuner import clear_dead, other_searches, search_folder

SEARCH = """
import os, subprocess, sys, tempfile
from graphkiln.tuning.tuner import search_folder
tempfile.tempdir = sys.argv[1]
with search_folder() as folder:
    tempfile.mkdtemp(prefix="graphkiln-")
    server = subprocess.Popen(["sleep", "600"])
    print(folder, server.pid, flush=True)
    sys.stdin.read()
    os._exit(9)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of the test's own; nothing of the machine's is looked at."""
    monkeypatch.setattr(module, "OTHER_PARENTS", ())
    monkeypatch.setattr(module, "remove_leftovers", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def search(place: Path) -> Iterator[tuple[Path, int, subprocess.Popen[str]]]:
    """Another search with a server: its folder, the server's process, and its own."""
    command = [sys.executable, "-c", SEARCH, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        folder, server = process.stdout.readline().split()
        yield Path(folder), int(server), process
        process.kill()
        with suppress(ProcessLookupError):
            os.kill(int(server), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_temporary_files_lie_below_one_folder_that_vanishes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with search_folder() as folder:
        assert folder.parent == place
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(folder)
        (Path(tempfile.mkdtemp()) / "file").touch()
    assert list(place.iterdir()) == []
    assert tempfile.gettempdir() == str(place)
    assert "TMPDIR" not in os.environ


def test_a_search_that_lives_is_left_alone_and_told(
    search: tuple[Path, int, subprocess.Popen[str]], place: Path, logged: list[str]
) -> None:
    folder, server, process = search
    assert other_searches([place]) == [process.pid]
    with module.search_folder():
        assert logged == [
            f"another search runs on this machine (process {process.pid}): each measures what the other one leaves"
        ]
    assert clear_dead([place]) == []
    assert is_running(server)
    assert list(folder.iterdir())


def test_what_a_killed_one_left_goes_when_the_next_begins(
    search: tuple[Path, int, subprocess.Popen[str]], place: Path
) -> None:
    folder, server, process = search
    process.kill()
    process.wait()
    assert is_running(server)
    assert folder.is_dir()
    assert other_searches([place]) == []
    with search_folder() as own:
        assert list(place.iterdir()) == [own]
        assert not is_running(server)


def test_folders_that_nobody_owned_stay(place: Path) -> None:
    (place / "graphkiln-search-mine").mkdir()
    assert clear_dead([place]) == []
    assert (place / "graphkiln-search-mine").is_dir()
