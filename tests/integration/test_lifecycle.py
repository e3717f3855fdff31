"""Death, restart, reload and replacement of versions on the real server."""

from __future__ import annotations

import http.client
import os
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import zoo
from running import Server, StartServer, is_stub

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ServerError
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_client import Client

pytestmark = pytest.mark.server

SIDE = 4096


def stubs(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if is_stub(child)]


def answers(server: Server) -> bool:
    try:
        with Client(server.url, timeout_s=5) as client:
            client.model("digits").classify("docs/digits/four.png")
    except ClientError:
        return False
    return True


# Replaces the stub that Triton starts for each instance; it dies before its first message.
_DYING_ONCE = """#!/bin/sh
mkdir "$0.died" 2> /dev/null && kill -9 $$
exec /bin/bash "$@"
"""


@pytest.mark.slow
def test_instance_that_dies_before_its_first_message(
    start_server: StartServer, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton waits for its first message forever."""
    shell = tmp_path / "bin" / "bash"
    shell.parent.mkdir()
    shell.write_text(_DYING_ONCE)
    shell.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shell.parent}:{os.environ['PATH']}")
    server = start_server("--model-store", digits.parent)
    server.wait_ready()
    assert (shell.parent / "bash.died").exists()
    assert "an instance died at its start: restarting the server" in server.log
    assert answers(server)
    assert server.stop()[0] == 0


def restoration(server: Server) -> tuple[float, float]:
    """Kill the instance; return the seconds until its death was noticed and until it served again."""
    (stub,) = stubs(server)
    killed = time.monotonic()
    stub.kill()
    server.wait_until(lambda: server.status("/v2/health/ready") != 200)
    noticed = time.monotonic() - killed
    server.wait_ready()
    return noticed, time.monotonic() - killed


def test_killed_instance_is_restored_and_requests_in_flight_fail(start_server: StartServer, slow_store: Path) -> None:
    """The delay is measured by `scripts/soak`: other tests keep this machine busy."""
    server = start_server("--model-store", slow_store)
    server.wait_until(lambda: "serving HTTP" in server.log)
    noticed_s, restored_s = restoration(server)
    assert noticed_s < restored_s < 60
    assert "an instance of slow version 1 died: restarting the server" in server.log
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            with Client(server.url, timeout_s=60, max_retries=0) as client:
                client.model("slow").infer({"ROUNDS": np.array([[10_000_000]])})
        except ClientError as error:
            errors.append(error)

    computed_s = server.computed_s()
    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_computing(computed_s)
    stubs(server)[0].kill()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(errors[0], ConnectionFailed | ServerError)
    server.wait_until(lambda: server.log.count("serving HTTP") == 3, timeout_s=60)
    server.wait_ready()
    with Client(server.url) as client:
        assert client.model("slow").infer({"ROUNDS": np.array([[3]])})["SUM"][0, 0] == 256.0
    assert server.stop()[0] == 0


@pytest.mark.slow
def test_repeated_deaths_end_the_server(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent)
    for starts in range(1, 7):
        server.wait_until(lambda starts=starts: server.log.count("serving HTTP") == starts)
        (stub,) = stubs(server)
        stub.kill()
    assert server.process.wait(30) == 1
    assert "giving up" in server.log


class Load(threading.Thread):
    """Send about 200 requests a second, one after the other, until stopped; keep every answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.running = True
        self.factors: list[float] = []
        self.errors: list[Exception] = []

    def run(self) -> None:
        with Client(self.url, timeout_s=10) as client:
            model = client.model("swap")
            due = time.monotonic()
            while self.running:
                try:
                    self.factors.append(float(model.infer({"x": np.ones((1, 3), np.float32)})["y"][0, 0]))
                except ClientError as error:
                    self.errors.append(error)
                due += 0.005
                time.sleep(max(0.0, due - time.monotonic()))


@pytest.fixture
def swap_store(tmp_path: Path) -> Path:
    zoo.add(tmp_path / "store", "swap", zoo.scale(("batch", 3), 1), "")
    return tmp_path / "store"


def publish(store: Path, version: int, factor: float) -> None:
    """Write a new version elsewhere and rename it into place, as converters do."""
    folder = zoo.add(store / ".new", "swap", zoo.scale(("batch", 3), factor), version=version)
    folder.rename(store / "swap" / str(version))


@pytest.mark.parametrize("mode", ["poll", pytest.param("explicit", marks=pytest.mark.slow)])
def test_replacing_a_version_under_load_loses_nothing(start_server: StartServer, swap_store: Path, mode: str) -> None:
    flags = ["--repository-poll-secs=1"] if mode == "poll" else ["--load-model=swap"]
    server = start_server("--model-store", swap_store, f"--model-control-mode={mode}", *flags)
    server.wait_ready()
    load = Load(server.url)
    load.start()
    server.wait_until(lambda: len(load.factors) > 100)
    publish(swap_store, 2, 2)
    if mode == "explicit":
        zoo_load(server, "swap")
    server.wait_until(lambda: load.factors.count(2.0) > 50)
    load.running = False
    load.join()
    assert load.errors == []
    assert set(load.factors) == {1.0, 2.0}
    assert load.factors == sorted(load.factors)


def zoo_load(server: Server, model: str, verb: str = "load") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    key = find_key("127.0.0.1", server.http_port)
    connection.request("POST", f"/v2/repository/models/{model}/{verb}", headers={HTTP_HEADER: key})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_old_version_serves_if_the_new_one_fails(start_server: StartServer, swap_store: Path) -> None:
    server = start_server("--model-store", swap_store, "--model-control-mode=explicit", "--load-model=swap")
    server.wait_ready()
    broken = zoo.add(swap_store / ".new", "swap", zoo.scale(("batch", 3), 2), version=2)
    (broken / "model.onnx").write_bytes((broken / "model.onnx").read_bytes()[:50])
    broken.rename(swap_store / "swap" / "2")
    status, text = zoo_load(server, "swap")
    assert status == 400
    assert "cut short" in text
    server.wait_until(lambda: "cut short" in server.log)
    with Client(server.url) as client:
        assert client.model("swap").infer({"x": np.ones((1, 3), np.float32)})["y"][0, 0] == 1.0


def pss_mb(process: psutil.Process) -> float:
    """Memory of a process in MB; shared pages are divided by their number of users."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def large() -> onnx.ModelProto:
    """Graph with 64 MB of weights: the sum of `SIDE` numbers, `SIDE` times."""
    weight = np.ones((SIDE, SIDE), np.float32)
    nodes = [zoo.helper.make_node("MatMul", ["x", "w"], ["y"])]
    return zoo.model(nodes, [zoo.value("x", ("batch", SIDE))], [zoo.value("y", ("batch", SIDE))], {"w": weight})


@pytest.mark.slow
def test_unloading_frees_memory_and_disk(start_server: StartServer, tmp_path: Path) -> None:
    two = "max_batch_size: 1 instance_group { count: 2 kind: KIND_CPU }"
    zoo.add(tmp_path / "store", "large", large(), two)
    server = start_server("--model-store", tmp_path / "store", "--model-control-mode=explicit")
    server.wait_until(lambda: server.status("/v2/health/live") == 200)
    triton = next(p for p in psutil.Process(server.process.pid).children() if p.name() == "tritonserver")
    run_folder = Path(triton.environ()["TMPDIR"]).parent

    def held_mb() -> tuple[float, float]:
        files = [path for path in run_folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return pss_mb(triton), sum(path.stat().st_size for path in files) / 2**20

    zoo_load(server, "large")
    zoo_load(server, "large", "unload")
    server.wait_until(lambda: not stubs(server), timeout_s=30)
    memory_mb, disk_mb = held_mb()
    for _ in range(3):
        assert zoo_load(server, "large")[0] == 200
        assert held_mb()[1] > disk_mb + 60
        zoo_load(server, "large", "unload")
        server.wait_until(lambda: not stubs(server), timeout_s=30)
    assert held_mb() == pytest.approx((memory_mb, disk_mb), abs=8)


@pytest.mark.slow
def test_two_instances_share_the_weights(start_server: StartServer, tmp_path: Path) -> None:
    """A model of 64 MB: two instances take at most 1.5 times the weights more than two tiny ones."""
    two = "max_batch_size: 1 instance_group { count: 2 kind: KIND_CPU }"
    zoo.add(tmp_path / "store", "large", large(), two)
    zoo.add(tmp_path / "store", "tiny", zoo.scale(("batch", 3)), two)
    server = start_server("--model-store", tmp_path / "store")
    server.wait_ready()
    with Client(server.url) as client:
        for _ in range(8):
            answer = client.model("large").infer({"x": np.ones((1, SIDE), np.float32)})["y"]
        np.testing.assert_array_equal(answer, np.full((1, SIDE), SIDE, np.float32))
    memory = {
        name: [pss_mb(s) for s in stubs(server) if f"/{name}/" in " ".join(s.cmdline())] for name in ("large", "tiny")
    }
    print(memory)
    assert [len(values) for values in memory.values()] == [2, 2]
    assert sum(memory["large"]) - sum(memory["tiny"]) < 1.5 * SIDE * SIDE * 4 / 2**20
