"""`graphkiln tune` and kill -9: the same search with the example model, undisturbed and killed ten times."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measurement import show_progress
from stores import DIGITS

KILLS = 10
_WORDS = ("--p99", "2s", "--rate", "60/s", "--only", "spin,instances", "--budget", "120s", "--json")
"""A target that a machine that is busy meets, too: what is looked at is what becomes of the journal."""
_RUN_S, _LATEST_S = 900, 12.0
_POLL_S = 0.05

Row = dict[str, object]


def benchmark_kills(rounds: int, seconds: float) -> list[Row]:
    """Once without a kill, then a round for each seed of the moments at which it is killed."""
    del seconds  # measurements last as long as the command says
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "models" / "digits"
        shutil.copytree(DIGITS, model)
        show_progress("undisturbed")
        undisturbed = _finish(model, Path(folder) / "undisturbed")
        rows = [_row("undisturbed", undisturbed, undisturbed, Path(folder) / "undisturbed", [])]
        for seed in range(rounds):
            cache = Path(folder) / f"killed-{seed}"
            moments = [_kill(model, cache, generator) for generator in [random.Random(seed)] for _ in range(KILLS)]  # noqa: S311
            rows.append(_row(f"killed, seed {seed}", _finish(model, cache), undisturbed, cache, moments))
    show_progress("")
    return rows


def _start(model: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphkiln.cli", "tune", str(model), *_WORDS]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _finish(model: Path, cache: Path) -> dict[str, Any]:
    """Goes on to the end.

    Raises:
        SystemExit: It found nothing, or failed.
    """
    process = _start(model, cache)
    printed, _ = process.communicate(timeout=_RUN_S)
    if process.returncode:
        sys.exit(f"graphkiln tune ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(printed)
    return found


def _kill(model: Path, cache: Path, generator: random.Random) -> str:
    """Kills it at a random moment after it began another measurement; returns which of its lines were written."""
    before, after_s = len(journal_lines(cache)), generator.uniform(0.0, _LATEST_S)
    show_progress(f"{before} lines, to be killed {after_s:.1f} s after the next one")
    with _start(model, cache) as process:
        while len(journal_lines(cache)) <= before and process.poll() is None:
            time.sleep(_POLL_S)
        end = time.monotonic() + after_s
        while time.monotonic() < end and process.poll() is None:
            time.sleep(_POLL_S)
        ended = process.poll() is not None
        process.kill()
    return "ended" if ended else f"{after_s:.1f}"


def journal_lines(cache: Path) -> list[bytes]:
    """The whole lines of the only journal; none before there is one."""
    found = list((cache / "graphkiln-tune").glob("*.jsonl"))
    return found[0].read_bytes().split(b"\n")[:-1] if found else []


def count_damaged(lines: Sequence[bytes]) -> int:
    """Lines that are no JSON objects."""
    return sum(not _is_object(line) for line in lines)


def count_repeated(lines: Sequence[bytes]) -> int:
    """Measurements that were made again although they had been done."""
    done = [json.dumps(event["done"], sort_keys=True) for event in map(json.loads, lines) if "done" in event]
    return len(done) - len(set(done))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _row(name: str, found: dict[str, Any], undisturbed: dict[str, Any], cache: Path, moments: Sequence[str]) -> Row:
    lines = journal_lines(cache)
    kills = [moment for moment in moments if moment != "ended"]
    return {
        "set-up": name,
        "kills": len(kills),
        "s after a line": ", ".join(kills) or "-",
        "lines": len(lines),
        "damaged": count_damaged(lines),
        "measurements": found["measurements"],
        "done twice": count_repeated(lines),
        "met": str(found["met"]),
        "p99 ms": round(found["promise"]["p99_ms"], 1) if found["promise"] else "-",
        "same choice": str(found["chosen"] and found["chosen"]["id"] == undisturbed["chosen"]["id"]),
        "choice": found["chosen"]["changes"] if found["chosen"] else "none",
    }
