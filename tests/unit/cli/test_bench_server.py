"""What a server says of a run: counters that grow, that went back, and the processor time of whoever listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest
from commands import FakeModel

from graphkiln.cli.bench import UNKNOWN, ServerWatch, breakdown, local_cpu_seconds
from graphkiln_backend.graph.errors import ConnectionFailed

LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
while time.process_time() < 0.5:
    pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""
"""Listens, computes for half a second when told to, and says how long it has computed since its start."""


def test_means_are_of_what_came_between_two_readings() -> None:
    model = FakeModel()
    found = breakdown(model.statistics(), model.statistics())
    assert found.us == {"queue": 10.0, "input": 20.0, "infer": 300.0, "output": 40.0}
    assert (found.batch, found.is_known) == (5.0, True)


def test_a_server_that_executed_nothing() -> None:
    still = FakeModel().statistics()
    found = breakdown(still, still)
    assert set(found.us.values()) == {0.0}
    assert found.batch == 0.0


def test_stages_that_a_server_does_not_count_are_zero() -> None:
    before: dict[str, Any] = {"inference_stats": {"success": {}}}
    after = {"inference_stats": {"success": {"count": 4}, "queue": {"ns": 8000}}}
    assert breakdown(before, after).us == {"queue": 2.0, "input": 0.0, "infer": 0.0, "output": 0.0}


def test_a_server_that_was_started_again_says_nothing_of_the_run() -> None:
    """Its counters begin at 0: the difference would be a time below zero."""
    assert breakdown(FakeModel(counted=1000).statistics(), FakeModel().statistics()) == UNKNOWN


class Failing(FakeModel):
    """Can be asked once."""

    def statistics(self) -> dict[str, Any]:
        if self.counted:
            raise ConnectionFailed("gone")
        return super().statistics()


def test_a_server_that_is_gone_costs_no_measurement() -> None:
    model: Any = Failing()
    watch = ServerWatch(model, "http://nowhere.test:8000")
    watch.start()
    assert watch.side(1.0) == UNKNOWN
    with pytest.raises(ConnectionFailed):
        watch.start()


def test_processor_time_of_whoever_listens() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        read = local_cpu_seconds(url)
        assert read is not None
        model: Any = FakeModel()
        watch = ServerWatch(model, url)
        watch.start()
        server.stdin.write(b"\n")
        server.stdin.flush()
        expected = float(server.stdout.readline())
        assert read() == pytest.approx(expected, abs=0.05)
        cores = watch.side(2.0).cores
        assert cores is not None
        assert 0 < cores <= expected
    assert read() == 0.0  # its process is no more
    assert watch.side(2.0).cores is None


def test_a_process_that_cannot_be_asked_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        read = local_cpu_seconds(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def fail(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "cpu_times", fail)
    assert read is not None
    assert read() == 0.0


@pytest.mark.parametrize("url", ["http://triton.test:8000", "grpc://10.0.0.1:8001"])
def test_of_another_machine_is_not_known(url: str) -> None:
    assert local_cpu_seconds(url) is None


def test_of_nobody_is_not_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert local_cpu_seconds(f"http://localhost:{port}") is None
