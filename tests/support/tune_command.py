"""`graphkiln tune` with a private cache, and the journal in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
from running import COMMAND

# More than any budget of these tests: a busy machine takes all of it, and its servers take long to start and stop.
_TIMEOUT_S = 700


def tune(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a search to its end; no process and no temporary file may remain.

    Args:
        folder: Parent of the cache and of temporary files.
        words: Arguments.
    """
    done = subprocess.run(
        [*COMMAND, "tune", *map(str, words)],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert leftovers(folder) == [], "nothing of it runs any more"
    assert list(temporary(folder).iterdir()) == [], "and no file is left"
    return done


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a search."""
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(temporary(folder))}
    return {**os.environ, **places, "COLUMNS": "80"}


def temporary(folder: Path) -> Path:
    """Create and return the folder of temporary files."""
    place = folder / "tmp"
    place.mkdir(exist_ok=True)
    return place


def processes(folder: Path) -> list[psutil.Process]:
    """Find the running processes of a search by the environment that they inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_CACHE_HOME") == str(folder / "cache"):
                found.append(process)
    return found


def leftovers(folder: Path) -> list[str]:
    """Return the command lines of the running processes of a search."""
    found = []
    for process in processes(folder):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def digest(folder: Path) -> str:
    """Return a digest of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def journals(folder: Path) -> list[Path]:
    """Return the journals of a search's cache."""
    return sorted((folder / "cache" / "graphkiln-tune").glob("*.jsonl"))


def journal(folder: Path) -> list[dict[str, Any]]:
    """Return the complete events of the only journal."""
    (path,) = journals(folder)
    return events(path)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a journal."""
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def measured(found: list[dict[str, Any]]) -> list[str]:
    """Return the completed measurements."""
    return [json.dumps(event["done"], sort_keys=True) for event in found if "done" in event]
