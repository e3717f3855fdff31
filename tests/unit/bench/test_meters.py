"""Meters of processes and of a server's counters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import FakeModel

from graphkiln.bench import meters
from graphkiln.bench.meters import UNKNOWN, EnergyMeter, ProcessMeter, ServerMeter, breakdown, listening_meter

LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
while time.process_time() < 0.5:
    pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""  # listens, computes for half a second on request, and prints its CPU time


def test_breakdown_means() -> None:
    model = FakeModel()
    found = breakdown(model.statistics(), model.statistics())
    assert found.us == {"queue": 10.0, "input": 20.0, "infer": 300.0, "output": 40.0}
    assert found.batch == 5.0


def test_breakdown_of_idle_or_restarted_server() -> None:
    still = FakeModel().statistics()
    found = breakdown(still, still)
    assert (set(found.us.values()), found.batch) == ({0.0}, 0.0)
    before: dict[str, Any] = {"inference_stats": {"success": {}}}
    after = {"inference_stats": {"success": {"count": 4}, "queue": {"ns": 8000}}}
    assert breakdown(before, after).us == {"queue": 2.0, "input": 0.0, "infer": 0.0, "output": 0.0}
    # Counters of another process begin at 0: the difference would be a time below zero.
    assert breakdown(FakeModel(counted=1000).statistics(), still) is UNKNOWN


def test_cpu_time_of_the_listening_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        read = listening_meter(url)
        assert read is not None
        model: Any = FakeModel()
        meter = ServerMeter(model, url)
        meter.start()
        server.stdin.write(b"\n")
        server.stdin.flush()
        expected = float(server.stdout.readline())
        assert read.cpu_s() == pytest.approx(expected, abs=0.05)
        assert 0 < (meter.side(2.0).cores or 0) <= expected

        def fail(process: psutil.Process) -> None:
            raise psutil.NoSuchProcess(process.pid)

        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "cpu_times", fail)
            assert read.cpu_s() == 0.0
    assert read.cpu_s() == 0.0  # its process is no more
    assert meter.side(2.0).cores is None


def test_unknown_listening_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for url in ("http://triton.test:8000", "grpc://10.0.0.1:8001", f"http://localhost:{port}"):
        assert listening_meter(url) is None


def test_memory_includes_children() -> None:
    program = "print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        meter = ProcessMeter(child.pid)
        alone, together = meter.memory_bytes(), ProcessMeter(os.getpid()).memory_bytes()
        assert alone
        assert together
        assert 1e6 < alone < together
        child.kill()
        child.wait()
        assert (meter.cpu_s(), meter.memory_bytes()) == (0, 0)


# Counters of energy.


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "energy_uj").write_text("1000000\n")
        (folder / "max_energy_range_uj").write_text("9000000\n")
    return tmp_path


def test_energy_counter_wraps_around(powercap: Path) -> None:
    meter = EnergyMeter(powercap)
    meter.begin()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("500000")
    assert meter.joules() == pytest.approx(8.5)


def test_energy_includes_gpus(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([{"gpu:0": 10.0}, {"gpu:0": 14.0}])
    monkeypatch.setattr(meters, "_read_gpus", lambda: next(read))
    meter = EnergyMeter(powercap)
    meter.begin()
    assert meter.joules() == pytest.approx(4)
