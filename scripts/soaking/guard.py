"""A guard process that cleans up after a soak, however the soak ends.

It waits on a pipe whose other end belongs to the soak and is closed by the kernel when the soak ends. Then it kills
every process with the soak's marker in its environment, unmounts disks and removes files. It runs in its own session
and ignores signals from the terminal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from graphkiln_backend.server.run_folder import remove_environments, remove_sent_models
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import start
from soaking.service import MARKER

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX keeps it on Linux
RUNS = "runs.txt"
_ROUNDS = 20


class Guard(Closeable):
    """Start a guard of this process."""

    def __init__(self, folder: Path) -> None:
        read_end, self._write_end = os.pipe()
        os.set_inheritable(self._write_end, False)
        command = [sys.executable, "-m", "soaking.guard", str(read_end), str(folder), str(os.getpid())]
        self._process = start(command, pass_fds=(read_end,))
        os.close(read_end)

    def close(self) -> None:
        """Clean up and wait for it."""
        os.close(self._write_end)
        self._process.wait(60)


@contextmanager
def guarded_folder(prefix: str) -> Iterator[Path]:
    """Make a guarded folder, which is removed with all of its processes in any case."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with Guard(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(read_end: int, folder: Path, soak_pid: int) -> None:
    """Wait for the end of the soak, then clean up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(read_end, 1):
        pass
    end_processes(str(folder))
    remove_outside(soak_pid, folder / "tmp")
    for mount in (folder / "tmp", *folder.glob("*.mount")):
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(marker: str) -> None:
    """Kill every process with a marker in its environment, including new ones."""
    for _ in range(_ROUNDS):
        found = [process for process in psutil.process_iter() if _carries(process, marker)]
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)


def remove_outside(soak_pid: int, temporary: Path) -> None:
    """Remove files of clients and of all known runs outside of the soak's folder."""
    runs = known_runs(temporary)
    for run in runs:
        remove_environments(run)
        remove_sent_models(temporary / run)
    for region in regions_of(soak_pid, runs):
        if region.is_dir():  # status files of instances
            shutil.rmtree(region, ignore_errors=True)
        else:
            region.unlink(missing_ok=True)


def regions_of(soak_pid: int, runs: set[str]) -> list[Path]:
    """Shared-memory regions of a soak's clients and of runs."""
    own = (f"graphkiln-client-{soak_pid}-", f"graphkiln-soak-{soak_pid}-", *(f"{run}-" for run in runs))
    return [path for path in sorted(SHARED_MEMORY.iterdir()) if path.name.startswith(own)]


def known_runs(temporary: Path) -> set[str]:
    """Names of all known runs with this folder for temporary files."""
    seen = temporary.with_name(RUNS)
    before = set(seen.read_text().split()) if seen.exists() else set()
    runs = before | {path.name for path in temporary.glob("graphkiln-*")}
    if runs != before:
        seen.write_text("\n".join(sorted(runs)))
    return runs


def _carries(process: psutil.Process, marker: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARKER) == marker
    except psutil.Error:
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
