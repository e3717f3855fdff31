"""Load generators (Triton's perf_analyzer if it is on PATH, else `graphkiln bench`) and Triton's C++ backend.

Both servers of a comparison are loaded by the same generator, in its own process: it costs both the same.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphkiln.story.server import STOP_S, LocalServer, free_ports
from graphkiln_backend.server.installation import find_installation
from graphkiln_backend.system import processes

PERF_ANALYZER = "perf_analyzer"
_WINDOWS = 3
_LEAST_WINDOW_MS = 1000
_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Load:
    """Measurement of one run.

    Attributes:
        per_second: Responses per second.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latencies.
    """

    per_second: float
    p50_ms: float
    p99_ms: float


def measure_load(url: str, model: str, concurrency: int, seconds: float) -> Load:
    """Load a served model with concurrent callers, by perf_analyzer if it is on PATH; `url` is http:// or grpc://."""
    if shutil.which(PERF_ANALYZER):
        return _perf_analyzer(url, model, seconds, "--concurrency-range", str(concurrency))
    # fmt: off
    output = _run(
        sys.executable, "-m", "graphkiln.cli", "bench", "--model", model, "--url", url, "--concurrency",
        str(concurrency), "--duration", str(max(seconds, 0.5)), "--warmup", "0.3", "--json",
    )
    # fmt: on
    client = json.loads(output)[0]["client"]
    latency_ms = client["latency_ms"]
    return Load(per_second=client["per_second"], p50_ms=latency_ms["p50"], p99_ms=latency_ms["p99"])


def measure_rate(url: str, model: str, rate: float, seconds: float) -> Load:
    """Send Poisson arrivals at a rate of requests per second by perf_analyzer."""
    arrivals = ("--request-rate-range", f"{rate:g}", "--request-distribution", "poisson")
    return _perf_analyzer(url, model, seconds, *arrivals)


def _perf_analyzer(url: str, model: str, seconds: float, *offered: str) -> Load:
    """Run Triton's load generator, a C++ program with a thread per caller, for three windows.

    Unstable windows are not rejected (-s 999): noise slows both servers.

    Raises:
        SystemExit: Its CSV report is empty.
    """
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
        rows = list(csv.DictReader(report.read_text().strip().splitlines()))
    if not rows:
        sys.exit(f"{PERF_ANALYZER} measured nothing")
    return Load(
        per_second=float(rows[0]["Inferences/Second"]),
        p50_ms=float(rows[0]["p50 latency"]) / 1e3,  # microseconds in the report
        p99_ms=float(rows[0]["p99 latency"]) / 1e3,
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


# Triton with its C++ onnxruntime backend, if it was built, in its own tritonserver.

LIBRARY = Path("onnxruntime") / "libtriton_onnxruntime.so"
_HOST = "127.0.0.1"
_READY_S = 120.0


def check_backend(folder: Path) -> Path:
    """Check a backend directory; return its absolute path.

    Raises:
        SystemExit: The directory has no C++ backend.
    """
    if not (folder / LIBRARY).is_file():
        sys.exit(f"--cpp-backend {folder}: expected {folder / LIBRARY}")
    return folder.resolve()


def native_flags(backends: Path | None) -> tuple[str, ...]:
    """Flags of `graphkiln serve` with the C++ backend installed, so that models may get the native seat."""
    return ("--backend-directory", str(backends.resolve())) if backends else ()


@contextmanager
def start_cpp_server(backends: Path, store: Path) -> Iterator[LocalServer]:
    """Serve a model repository on free ports until the context is left.

    Args:
        backends: A backend directory with `LIBRARY`; the libraries that this needs may lie in `lib` beside or above it.
        store: Model store whose configurations name the backend `onnxruntime`.

    Raises:
        SystemExit: The server ended, or is not ready in time; the message has the end of its log.
    """
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryFile("w+") as log:
        # fmt: off
        command = [
            str(find_installation().binary), f"--model-repository={store}",
            f"--backend-directory={backends}",
            f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--http-address={_HOST}",
            f"--grpc-address={_HOST}", f"--metrics-address={_HOST}", "--disable-auto-complete-config",
            "--exit-timeout-secs=5",
        ]
        # fmt: on
        server = processes.start(command, log=log, at_our_end=signal.SIGTERM, env=_environment(backends))
        try:
            reason = _wait_ready(server, f"http://{_HOST}:{http}/v2/health/ready")
            if reason:
                log.seek(0)
                sys.exit(f"the server with the C++ backend {reason}: {log.read()[-2000:]}")
            yield LocalServer(http_url=f"http://{_HOST}:{http}", grpc_url=f"grpc://{_HOST}:{grpc}", pid=server.pid)
        finally:
            processes.stop(server, STOP_S)


def _environment(backends: Path) -> dict[str, str]:
    libraries = [backends / "onnxruntime", backends / "lib", backends.parent / "lib"]
    found = [str(folder) for folder in libraries if folder.is_dir()]
    own = {"ORT_DISABLE_TELEMETRY": "1"}  # as `graphkiln serve` does; since ONNX Runtime 1.32 it is on
    return {**os.environ, **own, "LD_LIBRARY_PATH": os.pathsep.join([*found, find_installation().library_path])}


def _wait_ready(server: subprocess.Popen[bytes], url: str) -> str:
    """Wait until the server is ready; return an error or ""."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"ended with code {server.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return ""
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    return f"is not ready after {_READY_S:g} s"
