"""Load generators and their reports, and the server with Triton's C++ backend."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import servers
from servers import (
    LIBRARY,
    check_backend,
    measure_load,
    start_cpp_server,
)

from graphkiln_backend.server.installation import find_installation

REPORT = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "8,354.5,10,100,200,30,2700,40,3,21500,23000,24000,31250\n"
)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that would have run."""
    found: list[tuple[str, ...]] = []

    def fake(*command: str) -> str:
        found.append(command)
        if command[0] == "perf_analyzer":
            Path(command[command.index("-f") + 1]).write_text(REPORT)
        return json.dumps([{"client": {"per_second": 5.0, "latency_ms": {"p50": 1.5, "p99": 2.5}}}])

    monkeypatch.setattr(servers, "_run", fake)
    return found


def test_perf_analyzer_measures_three_windows(commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.shutil, "which", lambda program: program)
    load = measure_load("grpc://localhost:8001", "m", 8, 6.0)
    assert (load.per_second, load.p50_ms, load.p99_ms) == (354.5, 21.5, 31.25)  # the report has microseconds
    words = " ".join(commands[0])
    assert "-m m -u localhost:8001 -i grpc --concurrency-range 8 -p 2000 -r 3 -s 999" in words


def test_bench_measures_without_perf_analyzer(commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.shutil, "which", lambda _: None)
    load = measure_load("http://localhost:8000", "m", 2, 3.0)
    assert (load.per_second, load.p50_ms, load.p99_ms) == (5.0, 1.5, 2.5)
    assert "bench --model m --url http://localhost:8000 --concurrency 2 --duration 3.0" in " ".join(commands[0])


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    folder = tmp_path / "backends"
    (folder / LIBRARY).parent.mkdir(parents=True)
    (folder / LIBRARY).touch()
    (folder / "lib").mkdir()
    return folder


def _pretend(monkeypatch: pytest.MonkeyPatch, binary: Path, script: str) -> None:
    """Replace tritonserver by a script."""
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    installation = dataclasses.replace(find_installation(), binary=binary)
    monkeypatch.setattr(servers, "find_installation", lambda: installation)


def test_a_folder_without_the_backend_is_refused(tmp_path: Path, backends: Path) -> None:
    assert check_backend(backends) == backends.resolve()
    with pytest.raises(SystemExit, match=r"expected .*libtriton_onnxruntime\.so"):
        check_backend(tmp_path)


def test_the_log_of_a_server_that_exits_is_shown(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, tmp_path / "tritonserver", "echo no such model; exit 7")
    with pytest.raises(SystemExit, match=r"ended with code 7: no such model"), start_cpp_server(backends, tmp_path):
        pytest.fail("it is not ready")


def test_a_server_is_awaited_and_stopped(backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = (
        "import sys, http.server as h, pathlib as p, re; "
        "p.Path('v2/health').mkdir(parents=True); p.Path('v2/health/ready').touch(); "
        "port = int(re.search(r'--http-port=(\\d+)', ' '.join(sys.argv))[1]); "
        "h.HTTPServer(('127.0.0.1', port), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    _pretend(monkeypatch, tmp_path / "tritonserver", f'cd {tmp_path} && exec python3 -c "{serve}" "$@"')
    with start_cpp_server(backends, tmp_path) as server:
        assert server.http_url.startswith("http://127.0.0.1:")
        assert Path(f"/proc/{server.pid}").exists()
    assert not Path(f"/proc/{server.pid}").exists()
