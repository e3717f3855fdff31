"""What loads a server from outside: Triton's perf_analyzer where it is on PATH, else `graphkiln bench`.

Both servers of a comparison are loaded by the same one, in a process of its own, so that what it costs is the same.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PERF_ANALYZER = "perf_analyzer"
_WINDOWS = 3
_LEAST_WINDOW_MS = 1000
_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a generator measured of one run.

    Attributes:
        per_second: Responses per second.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latencies.
    """

    per_second: float
    p50_ms: float
    p99_ms: float


class Generator(Protocol):
    """Loads a served model with so many concurrent callers, for so many seconds."""

    name: str

    def __call__(self, url: str, model: str, concurrency: int, seconds: float) -> Load:
        """Measures; `url` begins with http:// or grpc://."""
        ...


class PerfAnalyzer:
    """Triton's own: a program in C++ with a thread for each caller."""

    name = PERF_ANALYZER

    def __call__(self, url: str, model: str, concurrency: int, seconds: float) -> Load:
        """Measures three windows of time, which no instability rejects: a noisy machine slows both servers."""
        return self._measure(url, model, seconds, "--concurrency-range", str(concurrency))

    def at_rate(self, url: str, model: str, rate: float, seconds: float) -> Load:
        """The same with so many requests per second, at the moments of a Poisson process."""
        arrivals = ("--request-rate-range", f"{rate:g}", "--request-distribution", "poisson")
        return self._measure(url, model, seconds, *arrivals)

    def _measure(self, url: str, model: str, seconds: float, *offered: str) -> Load:
        protocol, _, address = url.partition("://")
        window_ms = max(int(seconds * 1000 / _WINDOWS), _LEAST_WINDOW_MS)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.csv"
            # fmt: off
            _run(
                PERF_ANALYZER, "-m", model, "-u", address, "-i", protocol, *offered,
                "-p", str(window_ms), "-r", str(_WINDOWS), "-s", "999", "-f", str(report),
            )
            # fmt: on
            return read_report(report.read_text())


class Bench:
    """`graphkiln bench`."""

    name = "graphkiln bench"

    def __call__(self, url: str, model: str, concurrency: int, seconds: float) -> Load:
        """Measures after a short warm-up."""
        # fmt: off
        output = _run(
            sys.executable, "-m", "graphkiln.cli", "bench", "--model", model, "--url", url, "--concurrency",
            str(concurrency), "--duration", str(max(seconds, 0.5)), "--warmup", "0.3", "--json",
        )
        # fmt: on
        return read_bench(output)


def find_generator() -> Generator:
    """perf_analyzer if it is on PATH."""
    return PerfAnalyzer() if shutil.which(PERF_ANALYZER) else Bench()


def read_report(text: str) -> Load:
    """Reads perf_analyzer's CSV report; its latencies are microseconds.

    Raises:
        SystemExit: It measured nothing.
    """
    rows = list(csv.DictReader(text.strip().splitlines()))
    if not rows:
        sys.exit(f"{PERF_ANALYZER} measured nothing")
    row: Mapping[str, str] = rows[0]
    return Load(
        per_second=float(row["Inferences/Second"]),
        p50_ms=float(row["p50 latency"]) / 1e3,
        p99_ms=float(row["p99 latency"]) / 1e3,
    )


def read_bench(text: str) -> Load:
    """Reads what `graphkiln bench --json` prints of one run."""
    client = json.loads(text)[0]["client"]
    latency_ms = client["latency_ms"]
    return Load(per_second=client["per_second"], p50_ms=latency_ms["p50"], p99_ms=latency_ms["p99"])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout
