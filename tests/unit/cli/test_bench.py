"""`graphkiln bench`: loads, inputs, what the server says, and mistakes; the load itself is a stand-in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from commands import FakeClient, FakeModel, RunVerb

from graphkiln.bench import processes as load_processes
from graphkiln.bench.generator import Measurement
from graphkiln.bench.job import Feeds, Load, Target
from graphkiln.cli.bench_server import UNKNOWN, ServerWatch, breakdown, local_cpu_seconds
from graphkiln_backend.graph.errors import ConnectionFailed, ServerError

LATENCIES = {"p50": 1.5, "p90": 2.0, "p99": 3.25, "p99.9": 4.0, "mean": 1.6}


def measurement(**fields: Any) -> Measurement:
    usual = {
        "seconds": 2.0, "answered": 200, "due": 0, "unsent": 0, "errors": {}, "per_second": 100.0,
        "per_second_range": (98.0, 103.0), "latency_ms": LATENCIES, "client_cores": 0.25, "processes": 3,
    }  # fmt: skip
    return Measurement(**{**usual, **fields})


class Loads:
    """Stands in for the load generator, and notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[Load] = []
        self.targets: list[Target] = []
        self.samples: list[list[Feeds]] = []
        self.results = [measurement()]

    def __call__(self, target: Target, samples: list[Feeds], load: Load, at_start: Callable[[], None]) -> Measurement:
        self.calls.append(load)
        self.targets.append(target)
        self.samples.append(samples)
        at_start()
        return self.results[min(len(self.calls), len(self.results)) - 1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    fake = Loads()
    monkeypatch.setattr(load_processes, "measure_load", fake)
    return fake


@pytest.mark.usefixtures("client")
def test_options_reach_the_load(run: RunVerb, loads: Loads) -> None:
    connection = ("--url", "grpc://triton.test:8001", "--header", "A: b")
    words = ("--concurrency", "1,4,16", "--duration", "2", "--warmup", "0", "--shared-memory")
    assert run("bench", "--model", "m", "--version", "2", *connection, *words).code == 0
    assert loads.calls == [Load(callers=callers, seconds=2.0, warmup_s=0.0) for callers in (1, 4, 16)]
    target = loads.targets[0]
    assert (target.model, target.version, target.shared_memory) == ("m", "2", True)
    assert (target.client["url"], target.client["headers"]) == ("grpc://triton.test:8001", {"A": "b"})


@pytest.mark.usefixtures("client")
def test_a_rate_is_an_open_loop(run: RunVerb, loads: Loads) -> None:
    assert "12.5/s" in run("bench", "--model", "m", "--rate", "12.5").out
    (load,) = loads.calls
    assert load.arrivals is not None
    assert len(load.arrivals) == pytest.approx(12.5 * 11, rel=0.3)


class TestInputs:
    def test_samples_go_to_the_load(self, run: RunVerb, client: FakeClient, loads: Loads, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", X=np.arange(12, dtype=np.float32).reshape(3, 2, 2))
        assert run("bench", "--model", "m", "--samples", tmp_path / "s.npz").code == 0
        assert [feeds["X"].shape for feeds in loads.samples[0]] == [(1, 2, 2)] * 3
        assert len(client.fake_model.fed) == 1  # the first one is tried before the load
        assert client.open == 0

    def test_an_error_of_the_model_comes_before_the_load(self, run: RunVerb, loads: Loads, client: FakeClient) -> None:
        client.fake_model.error = ServerError("no such tensor")
        finished = run("bench", "--model", "m")
        assert (finished.code, finished.err) == (1, "graphkiln: no such tensor\n")
        assert loads.calls == []
        assert client.open == 0

    def test_samples_and_an_input_contradict_each_other(self, run: RunVerb, client: FakeClient, loads: Loads) -> None:
        finished = run("bench", "--model", "m", "--samples", "x.npz", "--input", "random")
        assert finished.code == 2
        assert "--samples and --input" in finished.err
        assert loads.calls == []
        assert client.connected == []


class TestTables:
    def cells(self, out: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]

    @pytest.mark.usefixtures("client", "loads")
    def test_client_and_server_of_the_same_time(self, run: RunVerb) -> None:
        out = run("bench", "--model", "m").out
        client, server = self.cells(out)
        assert "sent by graphkiln in 3 processes, which took up to" in " ".join(out.split())
        assert client == ["1", "100.0 ± 3.0", "1.50", "2.00", "3.25", "4.00", "0.25"]
        assert server == ["1", "10", "20", "300", "40", "5.0", "-"]  # means of one request, and the batch
        assert "±: 95% of the rate, by ten windows of time" in " ".join(out.split())

    @pytest.mark.usefixtures("client")
    def test_errors_and_unsent_requests_have_columns_and_a_code(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(), measurement(errors={"Overloaded": 3, "ServerError": 1}, unsent=7)]
        finished = run("bench", "--model", "m", "--concurrency", "1,2")
        assert finished.code == 1
        rows = self.cells(finished.out)
        first, second = (next(row for row in rows if row[0] == load and len(row) == 9) for load in "12")
        assert first[-2:] == ["0", "0"]
        assert second[-1] == "7"
        errors = "".join(row[-2] for row in rows[rows.index(second) :] if len(row) == 9)
        assert errors.replace(" ", "") == "3Overloaded1ServerError"  # folded, not cut short

    @pytest.mark.usefixtures("client")
    def test_a_run_without_any_answer(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(latency_ms={}, per_second=0.0, per_second_range=(0.0, 0.0), answered=0)]
        (client, _) = self.cells(run("bench", "--model", "m").out)
        assert client[1:6] == ["0.0 ± 0.0", "-", "-", "-", "-"]

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(
        ("due", "answered", "told"), [(200, 195, False), (200, 150, True), (9, 5, False), (0, 9, False)]
    )
    def test_a_rate_that_was_not_reached_is_told(
        self, run: RunVerb, loads: Loads, due: int, answered: int, told: bool
    ) -> None:
        loads.results = [measurement(due=due, answered=answered)]
        out = " ".join(run("bench", "--model", "m", "--rate", "100").out.split())
        words = f"100/s: {due / 2:.1f} requests a second were due, and {answered / 2:.1f} answered"
        assert (words in out) is told

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(
        ("answered", "few"), [(1, "p50, p90, p99, p99.9"), (99, "p99, p99.9"), (100, "p99.9"), (1000, ""), (0, "")]
    )
    def test_percentiles_of_too_few_requests_are_told(
        self, run: RunVerb, loads: Loads, answered: int, few: str
    ) -> None:
        loads.results = [measurement(answered=answered)]
        out = " ".join(run("bench", "--model", "m").out.split())
        told = f"1: requests answered: {answered}; so few that {few} {'are' if ',' in few else 'is'} the slowest alone"
        assert (told in out) is bool(few)
        assert ("so few" in out) is bool(few)

    @pytest.mark.usefixtures("loads")
    @pytest.mark.parametrize("how", ["started again", "gone"])
    def test_a_server_that_does_not_last_costs_no_measurement(
        self, run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
    ) -> None:
        first = FakeModel(counted=1000).statistics()
        readings: list[Any] = [first, FakeModel().statistics() if how == "started again" else ConnectionFailed("gone")]

        def read() -> dict[str, Any]:
            reading = readings.pop(0)
            if isinstance(reading, Exception):
                raise reading
            return reading

        monkeypatch.setattr(client.fake_model, "statistics", read)
        page = tmp_path / "bench.html"
        finished = run("bench", "--model", "m", "--html", page)
        measured, served = self.cells(finished.out)
        assert measured[2] == "1.50"
        assert served == ["1", "-", "-", "-", "-", "-", "-"]
        assert "the server was started again, or is gone" in " ".join(finished.out.split())
        assert finished.code == 0
        assert page.stat().st_size

    @pytest.mark.usefixtures("client")
    def test_fit_80_columns(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [
            measurement(
                per_second=123456.7,
                per_second_range=(100000.0, 140000.0),
                latency_ms=dict.fromkeys(LATENCIES, 12345.67),
                errors={"DeadlineExceeded": 123456},
                unsent=12345,
            )
        ]
        out = run("bench", "--model", "m", "--rate", "123456.7", "--burst", "128").out
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.usefixtures("client")
    def test_json_is_a_list_of_runs(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(), measurement(errors={"ServerError": 1})]
        finished = run("bench", "--model", "m", "--concurrency", "1,2", "--json")
        first, second = json.loads(finished.out)
        assert finished.code == 1
        assert first["load"] == "1"
        assert first["client"]["latency_ms"] == LATENCIES
        assert first["generator"]["name"] == "graphkiln"
        assert (first["generator"]["processes"], first["generator"]["cores"]) == (3, 0.25)
        assert first["generator"]["share_of_machine"] == pytest.approx(0.25 / len(os.sched_getaffinity(0)))
        assert first["server_us"] == {"queue": 10.0, "input": 20.0, "infer": 300.0, "output": 40.0}
        assert first["batch"] == 5.0
        assert first["server_cores"] is None
        assert second["client"]["errors"] == {"ServerError": 1}


# The server's side of a run: counters that grow, that went back, and CPU time of the listening process.

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


def test_means_are_of_what_came_between_two_readings() -> None:
    model = FakeModel()
    found = breakdown(model.statistics(), model.statistics())
    assert found.us == {"queue": 10.0, "input": 20.0, "infer": 300.0, "output": 40.0}
    assert found.batch == 5.0


def test_readings_without_requests_or_of_a_server_that_was_started_again() -> None:
    still = FakeModel().statistics()
    found = breakdown(still, still)
    assert (set(found.us.values()), found.batch) == ({0.0}, 0.0)
    before: dict[str, Any] = {"inference_stats": {"success": {}}}
    after = {"inference_stats": {"success": {"count": 4}, "queue": {"ns": 8000}}}
    assert breakdown(before, after).us == {"queue": 2.0, "input": 0.0, "infer": 0.0, "output": 0.0}
    # Counters of another process begin at 0: the difference would be a time below zero.
    assert breakdown(FakeModel(counted=1000).statistics(), still) is UNKNOWN


def test_cpu_time_of_the_listening_process() -> None:
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


def test_other_addresses_are_not_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for url in ("http://triton.test:8000", "grpc://10.0.0.1:8001", f"http://localhost:{port}"):
        assert local_cpu_seconds(url) is None
