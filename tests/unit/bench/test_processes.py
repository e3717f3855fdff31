"""The load generator with several worker processes and a small HTTP server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import psutil
import pytest

from graphkiln.bench import processes as load_processes
from graphkiln.bench.arrivals import constant
from graphkiln.bench.processes import (
    Feeds,
    Job,
    Load,
    Target,
    measure_load,
    process_count,
    receive_message,
    send_message,
)
from graphkiln_backend.graph.errors import MeasurementError

Started = Callable[[], list[psutil.Process]]
SAMPLES: list[Feeds] = [{"X": np.full((1, 2), number, np.float32)} for number in range(3)]


class Server(ThreadingHTTPServer):
    """Responds to inferences after ten milliseconds and records their inputs."""

    daemon_threads = True
    held: set[float]
    status = 200


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._respond(200, {"name": "triton", "version": "2", "extensions": ["binary_tensor_data"]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        header = int(self.headers["Inference-Header-Content-Length"])
        self.server.held.add(float(np.frombuffer(body[header:], np.float32)[0]))
        time.sleep(0.01)
        outputs = [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [1.0]}]
        self._respond(self.server.status, {"model_name": "m", "model_version": "1", "outputs": outputs, "error": "no"})

    def _respond(self, status: int, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Suppress the log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as found:
        found.held = set()
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def started() -> Started:
    """Return the running child processes that this test has started."""
    before = {child.pid for child in psutil.Process().children()}
    return lambda: [child for child in psutil.Process().children() if child.pid not in before]


@pytest.fixture
def target(server: Server) -> Target:
    return Target(client={"url": f"http://127.0.0.1:{server.server_port}", "max_retries": 0}, model="m")


def test_callers_are_spread_over_processes(
    server: Server, target: Target, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_processes, "process_count", lambda _: 2)
    begun: list[float] = []
    load = Load(callers=3, seconds=0.7, warmup_s=0.2)
    seen = measure_load(target, SAMPLES, load, lambda: begun.append(time.perf_counter()))
    assert len(begun) == 1
    assert seen.processes == 2
    assert seen.answered > 10
    assert seen.latency_ms["p50"] > 10
    # Little's law: callers = rate x latency.
    assert seen.per_second * seen.latency_ms["mean"] / 1e3 == pytest.approx(3, rel=0.25)
    assert server.held == {0, 1, 2}
    assert started() == []


def test_open_loop_over_processes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_processes, "process_count", lambda _: 2)
    load = Load(callers=8, seconds=1.0, warmup_s=0.2, arrivals=constant(50, 1.2))
    seen = measure_load(target, SAMPLES[:1], load)
    assert seen.answered + seen.unsent == pytest.approx(50, rel=0.3)  # a busy machine begins late
    assert seen.errors == {}


def test_failing_requests_are_reported(server: Server, target: Target, started: Started) -> None:
    server.status = 404
    with pytest.raises(MeasurementError, match="cannot send its requests: the server returned 404"):
        measure_load(target, SAMPLES, Load(callers=1, seconds=5.0, warmup_s=0))
    assert started() == []


def test_dead_worker_ends_measurement(target: Target, started: Started) -> None:
    def kill() -> None:
        for child in started():
            child.kill()

    with pytest.raises(MeasurementError, match="ended with code -9"):
        measure_load(target, SAMPLES, Load(callers=1, seconds=30.0, warmup_s=0), kill)


def test_slow_worker_exit(target: Target, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_processes, "_EXIT_TIMEOUT_S", 0)
    assert measure_load(target, SAMPLES, Load(callers=1, seconds=0.5, warmup_s=0)).answered > 0
    assert started() == []


def test_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_processes, "usable_cores", lambda: 2)
    assert [process_count(callers) for callers in (1, 3, 8, 256)] == [1, 3, 4, 4]
    monkeypatch.setattr(load_processes, "usable_cores", lambda: 64)
    assert process_count(256) == 16


def start_worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", load_processes._PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.timeout(120)
def test_worker_ends_with_parent(server: Server, target: Target) -> None:
    """The worker ignores Ctrl-C and ends when its standard input is closed."""
    with start_worker() as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        send_message(worker.stdin, Job(target=target, load=Load(callers=2, seconds=600, warmup_s=0), samples=SAMPLES))
        assert receive_message(worker.stdout) is None
        worker.send_signal(signal.SIGINT)
        send_message(worker.stdin, time.perf_counter())
        while server.held != {0, 1, 2}:  # the load is under way
            time.sleep(0.01)
        worker.stdin.close()
        assert worker.wait() == 128 + signal.SIGTERM
        assert worker.stderr.read() == b""
