"""Runs `graphkiln tune` with a cache of its own, and reads what it kept there."""

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
    """Runs it to its end; nothing that it started may be left.

    Args:
        folder: Where its cache lies.
        words: Its arguments.
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
    """What it runs with."""
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(temporary(folder))}
    return {**os.environ, **places, "COLUMNS": "80"}


def temporary(folder: Path) -> Path:
    """Where it makes temporary files."""
    place = folder / "tmp"
    place.mkdir(exist_ok=True)
    return place


def processes(folder: Path) -> list[psutil.Process]:
    """Those of a tuner that are still there: all of them inherit its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_CACHE_HOME") == str(folder / "cache"):
                found.append(process)
    return found


def leftovers(folder: Path) -> list[str]:
    """Command lines of the same."""
    found = []
    for process in processes(folder):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def digest(folder: Path) -> str:
    """Of all files in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def journals(folder: Path) -> list[Path]:
    """What it keeps."""
    return sorted((folder / "cache" / "graphkiln-tune").glob("*.jsonl"))


def journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the only journal."""
    (path,) = journals(folder)
    return events(path)


def events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal."""
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def measured(found: list[dict[str, Any]]) -> list[str]:
    """Which measurements were done."""
    return [json.dumps(event["done"], sort_keys=True) for event in found if "done" in event]
