"""Faults that end or stop a real tritonserver, and the recovery."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from running import COMMAND, Server, StartServer, run_command

from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.server.edge import find_haproxy
from graphkiln_backend.server.run_folder import remove_leftovers
from graphkiln_client import Client

pytestmark = pytest.mark.server

ROW = [0.5] * 1024


def post(server: Server, path: str, body: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", path, body)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def infer(server: Server, **changes: object) -> int | None:
    tensor = {"name": "INPUT_0", "datatype": "FP32", "shape": [1, 1, 32, 32], **changes}
    return post(server, "/v2/models/digits/infer", json.dumps({"inputs": [tensor]}))


def triton(server: Server) -> psutil.Process:
    return next(p for p in psutil.Process(server.process.pid).children() if p.name() == "tritonserver")


def stub(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if child.name().startswith("triton_python_b"))


def serves(server: Server) -> bool:
    return server.status("/v2/health/ready") == 200 and infer(server, data=ROW) == 200


def check_recovery(server: Server, fault: Callable[[Server], object], *expected: str) -> None:
    """Check that the fault is logged and the service recovers."""
    server.wait_until(lambda: serves(server))
    before = len(server.log)
    fault(server)
    # The table of the server before may be printed only now.
    server.wait_until(lambda: any(text in server.log[before:] for text in expected), timeout_s=60)
    server.wait_until(lambda: serves(server), timeout_s=60)


@pytest.mark.slow
def test_crashing_server_is_restarted_each_time(start_server: StartServer, digits: Path) -> None:
    """Signals stand for requests that crash Triton."""
    server = start_server("--model-store", digits.parent)
    endings = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
    for ending in endings:
        before = len(server.log)
        check_recovery(server, lambda server, ending=ending: triton(server).send_signal(ending), ending.name)
        assert f"tritonserver was killed by {ending.name}: restarting the server" in server.log[before:]
        time.sleep(3)  # so that these count as several attacks, and not as a server that cannot be helped
    restarts = {name: value for name, value in server.metrics().items() if "restarts_total" in name}
    assert sum(restarts.values()) == len(endings), restarts
    assert server.stop()[0] == 0


def test_killed_tritonserver_is_restarted_and_ends_with_a_killed_supervisor(
    start_server: StartServer, digits: Path
) -> None:
    server = start_server("--model-store", digits.parent)
    check_recovery(server, lambda server: triton(server).kill(), "tritonserver was killed by SIGKILL: restarting")
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=40)
    assert not alive
    remove_leftovers([server.temporary])  # as the next start does


@pytest.mark.slow
@pytest.mark.parametrize("which", [triton, stub])
def test_stopped_process_is_replaced_and_requests_in_flight_fail(
    start_server: StartServer, digits: Path, which: Callable[[Server], psutil.Process]
) -> None:
    server = start_server("--model-store", digits.parent)
    answers: list[int | None] = []

    def freeze(server: Server) -> None:
        which(server).suspend()
        caller = threading.Thread(target=lambda: answers.append(infer(server, data=ROW)))
        caller.start()
        caller.join(30)
        assert not caller.is_alive(), "it hangs"

    check_recovery(server, freeze, "was stopped by a signal: restarting")
    assert answers in ([None], [500], [503])


@pytest.mark.slow
def test_endless_batch_fails_and_the_service_recovers(start_server: StartServer, slow_store: Path) -> None:
    server = start_server("--model-store", slow_store, "--compute-limit=2")
    server.wait_ready()
    begun = time.monotonic()
    with Client(server.url, timeout_s=60, max_retries=0) as client, pytest.raises(ClientError):
        client.model("slow").infer({"ROUNDS": np.array([[10_000_000]])})
    assert time.monotonic() - begun < 30
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    assert "has computed one batch for 2 s (--compute-limit): restarting the server" in server.log


class KeepAlive(threading.Thread):
    """Send one request after the other over one connection until none is answered."""

    def __init__(self, server: Server, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._server, self._pause_s = server, pause_s
        self.statuses: list[int] = []
        self.errors: list[Exception] = []

    def run(self) -> None:
        body = json.dumps({"inputs": [{"name": "INPUT_0", "datatype": "FP32", "shape": [1, 1, 32, 32], "data": ROW}]})
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=30)
        try:
            while True:
                connection.request("POST", "/v2/models/digits/infer", body)
                response = connection.getresponse()
                response.read()
                self.statuses.append(response.status)
                time.sleep(self._pause_s)
        except ConnectionRefusedError:
            pass  # the server has ended
        except (OSError, http.client.HTTPException) as error:
            self.errors.append(error)
        finally:
            connection.close()


@pytest.mark.skipif(find_haproxy() is None, reason="HAProxy is not installed")
def test_stop_answers_clients_that_keep_sending(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent, "--edge=on", "--drain", "30")  # time on a busy machine
    server.wait_until(lambda: serves(server))
    clients = [KeepAlive(server, pause_s) for pause_s in (0.5, 0.01, 0.01, 0.0)]
    failures: list[str] = []
    for client in clients:
        client.start()
    with Client(server.grpc_url, timeout_s=30, max_retries=0) as grpc:
        model = grpc.model("digits")
        image = np.zeros((1, 1, 32, 32), np.float32)
        model.infer({"INPUT_0": image})
        time.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:
            try:
                model.infer({"INPUT_0": image})
            except ClientError as error:
                failures.append(f"{type(error).__name__}: {error}")
            time.sleep(0.01)
    assert server.process.returncode == 0
    for client in clients:
        client.join(30)
        assert client.errors == []
        assert set(client.statuses) <= {200, 503}
        assert client.statuses == sorted(client.statuses)
    assert any(503 in client.statuses for client in clients)
    assert not [failure for failure in failures if not failure.startswith(("ConnectionFailed", "ModelNotReady"))]


def test_next_start_removes_leftovers_and_gets_the_ports(start_server: StartServer, digits: Path) -> None:
    """Includes a hanging instance; leftovers are removed even if the start then fails."""
    server = start_server("--model-store", digits.parent)
    server.wait_until(lambda: serves(server))
    (run_folder,) = server.temporary.iterdir()
    children = psutil.Process(server.process.pid).children(recursive=True)
    stub(server).suspend()
    server.process.kill()
    server.process.wait()
    environment = {"TMPDIR": str(server.temporary)}
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = f"--http-port={holder.getsockname()[1]}"
        finished = run_command("serve", "--model-store", digits.parent, port, env=environment)
    assert finished.returncode == 2
    assert "removed the leftovers of" in finished.stderr
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert list(server.temporary.iterdir()) == []
    assert list(Path("/dev/shm").glob(f"*{run_folder.name}*")) == []
    command = [*COMMAND, "serve", "--model-store", str(digits.parent), "--allow-metrics=false"]
    ports = [f"--http-port={server.http_port}", f"--grpc-port={server.grpc_port}"]
    with subprocess.Popen([*command, *ports], env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as again:
        try:
            deadline = time.monotonic() + 60
            while server.status("/v2/health/ready") != 200:
                assert again.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            again.terminate()
    assert again.returncode == 0
