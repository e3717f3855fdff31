"""`graphkiln tune` and kill -9: the same search with the example model, undisturbed twice and killed ten times.

What a kill may not change is said of each search by itself: no line of its journal is damaged, no measurement was done
twice, and none in vain, that is without the last run asking for it. Such a search went the way of one that nobody
disturbs and that measures the same. Two searches measure the same only as exactly as the machine is steady: where their
choices differ, both are served in turn under the same arrivals, and they are equal within noise where the mean of the
paired differences is not told from none at 95%, or is below a tenth.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement import show_progress
from stores import DIGITS

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.questions import read_questions
from graphkiln.tuning.served_candidate import Loading
from graphkiln.tuning.subject import read_subject, vanishing_cache
from graphkiln.tuning.trials import Failed, OpenLoop, Trials

KILLS = 10
_RATE = 60
_WORDS = ("--p99", "2s", "--rate", f"{_RATE}/s", "--only", "spin,instances", "--budget", "150s", "--json")
"""A target that a machine that is busy meets, too: what is looked at is what becomes of the journal."""
_RUN_S, _LATEST_S = 900, 12.0
_POLL_S = 0.05
_ROUNDS, _STUDENT_T = 6, 2.571
"""In which two choices are served in turn, and the two-sided 95% quantile of Student's t for their differences."""
_ALIKE = 0.1
"""What p99 of the same differs by from one start of a server to the next."""
_LEAST_S = 10.0

Row = dict[str, object]


def benchmark_kills(rounds: int, seconds: float) -> list[Row]:
    """Twice without a kill, then a round for each seed of the moments at which it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "models" / "digits"
        shutil.copytree(DIGITS, model)
        searches = [_search(model, Path(folder) / "undisturbed"), _search(model, Path(folder) / "again")]
        searches += [_search(model, Path(folder) / f"killed-{seed}", seed) for seed in range(rounds)]
        names = ["undisturbed", "undisturbed, again", *(f"killed, seed {seed}" for seed in range(rounds))]
        rows = []
        for name, search in zip(names, searches, strict=True):
            same = _beside(model, searches[0].found, search.found, max(seconds, _LEAST_S))
            rows.append({"set-up": name, **row_of(search), "same choice": same})
    show_progress("")
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """A search that came to its end.

    Attributes:
        found: What the last run printed.
        lines: Of its journal.
        moments: Seconds after a line at which it was killed, or `ended` where it came to its end before.
    """

    found: dict[str, Any]
    lines: list[bytes]
    moments: list[str]


def _search(model: Path, cache: Path, seed: int | None = None) -> Searched:
    generator = random.Random(seed)  # noqa: S311 - moments
    moments = [_kill(model, cache, generator) for _ in range(KILLS if seed is not None else 0)]
    show_progress(f"{cache.name}: to its end")
    found = _finish(model, cache)
    return Searched(found=found, lines=journal_lines(cache), moments=moments)


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
    done = _done(lines)
    return len(done) - len(set(done))


def count_unused(lines: Sequence[bytes], asked: int) -> int:
    """Measurements that were done in vain: the last run, from beginning to end, asked for so many and not for them."""
    return len(set(_done(lines))) - asked


def compare(logarithms: Sequence[float]) -> str:
    """Whether two choices are equal within noise, with the ratio of their p99 and its interval at 95%.

    Args:
        logarithms: Of the ratio, one for each of `_ROUNDS` rounds.
    """
    mean = statistics.fmean(logarithms)
    margin = _STUDENT_T * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    ratio, low, high = (math.exp(each) for each in (mean, mean - margin, mean + margin))
    is_equal = low <= 1 <= high or abs(ratio - 1) <= _ALIKE
    words = "equal within noise" if is_equal else "no"
    return f"{words}: p99 {ratio:.2f} times the first one's, {low:.2f} to {high:.2f}"


def row_of(search: Searched) -> Row:
    """What became of a search, and of its journal."""
    found, lines = search.found, search.lines
    kills = [moment for moment in search.moments if moment != "ended"]
    return {
        "kills": len(kills),
        "s after a line": ", ".join(kills) or "-",
        "lines": len(lines),
        "damaged": count_damaged(lines),
        "measurements": found["measurements"],
        "done twice": count_repeated(lines),
        "in vain": count_unused(lines, found["measurements"]),
        "met": str(found["met"]),
        "p99 ms": round(found["promise"]["p99_ms"], 1) if found["promise"] else "-",
        "choice": found["chosen"]["changes"] if found["chosen"] else "none",
    }


def _beside(model: Path, first: dict[str, Any], found: dict[str, Any], seconds: float) -> str:
    if not (first["chosen"] and found["chosen"]):
        return "yes" if first["chosen"] == found["chosen"] else "no: one chose nothing"
    one, other = (Candidate.from_json(each["chosen"]["configuration"]) for each in (first, found))
    return "yes" if one == other else compare(_race(model, one, other, seconds))


def _race(model: Path, one: Candidate, other: Candidate, seconds: float) -> list[float]:
    """Logarithms of the ratio of their p99, in rounds; who is first changes."""
    with vanishing_cache() as cache:
        subject = read_subject(model / "1", cache)
        with LocalTrials(subject=subject, loading=Loading(questions=read_questions(subject))) as trials:
            found = []
            for number in range(_ROUNDS):
                show_progress(f"both choices in turn, round {number + 1} of {_ROUNDS}")
                pair = (one, other) if number % 2 else (other, one)
                p99_s = {each: _p99_s(trials, each, seconds, number) for each in pair}
                found.append(math.log(p99_s[other] / p99_s[one]))
    return found


def _p99_s(trials: Trials, candidate: Candidate, seconds: float, seed: int) -> float:
    outcome = trials.measure(candidate, OpenLoop(_RATE), seconds, seed)
    if isinstance(outcome, Failed):
        sys.exit(f"{candidate}: {outcome.reason}")
    return outcome.latency.p99.value


def _done(lines: Sequence[bytes]) -> list[str]:
    events = [json.loads(line) for line in lines if _is_object(line)]
    return [json.dumps(event["done"], sort_keys=True) for event in events if "done" in event]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
