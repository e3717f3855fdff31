"""`graphkiln serve` against the real tritonserver: start, table, stop, faults."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from running import Server, StartServer, run_command

from graphkiln_backend.server.leftovers import remove_leftovers
from graphkiln_client import Client

pytestmark = pytest.mark.server

SHARED_MEMORY = Path("/dev/shm")


def slow_rounds(server: Server, seconds: float) -> int:
    """How many rounds of the `slow` model take about that long on this machine."""
    with Client(server.url) as client:
        model = client.model("slow")
        model.infer({"ROUNDS": np.array([[200]])})
        begun = time.perf_counter()
        model.infer({"ROUNDS": np.array([[2000]])})
        return int(2000 * seconds / (time.perf_counter() - begun))


class Asker(threading.Thread):
    """Asks the slow model once, in the background."""

    def __init__(self, url: str, rounds: int) -> None:
        super().__init__(daemon=True)
        self.url, self.rounds = url, rounds
        self.answer: float | Exception | None = None

    def run(self) -> None:
        try:
            with Client(self.url, timeout_s=60) as client:
                self.answer = float(client.model("slow").infer({"ROUNDS": np.array([[self.rounds]])})["SUM"][0, 0])
        except Exception as error:
            self.answer = error


def test_prints_one_table_of_what_is_served(server: Server) -> None:
    server.wait_until(lambda: "serving HTTP" in server.log)
    row = next(line for line in server.log.splitlines() if "digits" in line and "│" in line)
    assert "onnxruntime on cpu" in row
    assert "fp32" in row
    assert " ms" in row
    assert sum("precision" in line and "┃" in line for line in server.log.splitlines()) == 1
    assert max(len(line) for line in server.log.splitlines() if "│" in line) <= 80


def test_sigterm_with_idle_keep_alive_clients_ends_at_once_with_code_0(start_server: StartServer, digits: Path) -> None:
    """In five seconds on a machine that does nothing else: `tests/image`."""
    server = start_server("--model-store", digits.parent, "--drain=60")
    server.wait_ready()
    idle = [http.client.HTTPConnection("127.0.0.1", server.http_port) for _ in range(3)]
    for connection in idle:
        connection.request("GET", "/v2")
        connection.getresponse().read()
    code, seconds = server.stop()
    assert code == 0, server.log
    assert seconds < 30
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_in_flight_is_answered_before_the_server_ends(
    start_server: StartServer, slow_store: Path, protocol: str
) -> None:
    server = start_server("--model-store", slow_store, "--drain=60")
    server.wait_ready()
    asker = Asker(server.url if protocol == "http" else server.grpc_url, slow_rounds(server, seconds=4))
    computed_s = server.computed_s()
    asker.start()
    server.wait_computing(computed_s)
    code, seconds = server.stop()
    asker.join(60)
    assert asker.answer == 256.0, server.log
    assert code == 0, server.log
    assert seconds > 1


def test_a_second_signal_ends_at_once(start_server: StartServer, slow_store: Path) -> None:
    server = start_server("--model-store", slow_store)
    server.wait_ready()
    asker = Asker(server.url, slow_rounds(server, seconds=30))
    computed_s = server.computed_s()
    asker.start()
    server.wait_computing(computed_s)
    server.process.send_signal(signal.SIGINT)
    time.sleep(1)  # an instant later it would be one signal, which was sent twice
    code, seconds = server.stop(signal.SIGINT)
    assert code == 128 + signal.SIGKILL
    assert seconds < 15
    asker.join(60)
    assert isinstance(asker.answer, Exception)


def test_leaves_no_process_folder_or_shared_memory_behind(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent)
    server.wait_ready()
    children = psutil.Process(server.process.pid).children(recursive=True)
    run_folder = next(server.temporary.iterdir())
    regions = list(SHARED_MEMORY.glob(f"triton_python_backend_shm_region_{run_folder.name}-*"))
    assert children
    assert regions, "the prefix of the run's shared memory has changed: the check below would see nothing"
    assert server.stop()[0] == 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not run_folder.exists()
    assert not [region for region in regions if region.exists()]


def test_a_killed_supervisor_takes_the_server_with_it(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent)
    server.wait_ready()
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=40)
    assert not alive
    remove_leftovers([server.temporary])  # as the next start does


def test_is_ready_only_when_every_model_is_loaded(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(digits, store / "digits")
    shutil.copytree(digits, store / "broken")
    config = store / "broken" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "digits"', 'name: "broken"'))
    graph = store / "broken" / "1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:1000])
    server = start_server("--model-store", store, "--exit-on-error=false")
    server.wait_until(lambda: server.status("/v2/health/live") == 200)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert server.status("/v2/health/ready") != 200
    assert server.status("/v2/models/digits/ready") == 200
    assert "SHA-256" in server.log


def test_a_model_that_cannot_load_ends_the_server_where_that_is_asked_for(
    start_server: StartServer, digits: Path, tmp_path: Path
) -> None:
    shutil.copytree(digits, tmp_path / "store" / "digits")
    manifest = tmp_path / "store" / "digits" / "1" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["signatur"] = document.pop("signature")
    manifest.write_text(json.dumps(document))
    server = start_server("--model-store", tmp_path / "store", "--exit-on-error=true")
    assert server.process.wait(60) == 1
    assert "unknown key 'signatur' (did you mean 'signature'?)" in server.log


def test_serves_stores_with_spaces_in_their_paths_and_several_of_them(
    start_server: StartServer, slow_store: Path, digits: Path
) -> None:
    assert " " in str(slow_store)
    server = start_server("--model-store", slow_store, f"--model-store={digits.parent}")
    server.wait_ready()
    with Client(server.url) as client:
        assert client.model("slow").infer({"ROUNDS": np.array([[3]])})["SUM"][0, 0] == 256.0
    assert server.status("/v2/models/digits/ready") == 200


def test_the_default_store_is_model_repository_of_the_working_directory(
    start_server: StartServer, repository: Path
) -> None:
    server = start_server(cwd=repository)
    server.wait_ready()
    assert server.status("/v2/models/digits/ready") == 200


def test_forwards_flags_untouched(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent, "--model-control-mode", "explicit", "--id=kiln 7, a=b")
    server.wait_ready()
    server.wait_until(lambda: "no model is loaded" in server.log or "digits" in server.log)
    assert server.status("/v2/models/digits/ready") != 200
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
    connection.request("GET", "/v2")
    assert json.loads(connection.getresponse().read())["name"] == "kiln 7, a=b"
    connection.close()


def test_serves_without_http(start_server: StartServer, digits: Path) -> None:
    server = start_server("--model-store", digits.parent, "--allow-http=false")
    server.wait_until(lambda: "serving gRPC" in server.log)
    with Client(server.grpc_url) as client:
        assert client.ready()
    assert server.stop()[0] == 0


class TestMistakes:
    """Each is one line with the fix, and exit code 2."""

    def test_unknown_flag(self) -> None:
        self.check(("--http-prt=9",), "'--http-prt'", "did you mean '--http-port'?")

    def test_stray_argument(self) -> None:
        self.check(("models",), "unexpected argument 'models'", "--model-store models")

    def test_flag_without_value(self) -> None:
        self.check(("--log-file",), "--log-file needs a value")

    def test_missing_folder(self) -> None:
        self.check(("--model-store", "nowhere"), "'nowhere' is missing", "--model-store DIR")

    def test_port_that_is_no_number(self) -> None:
        self.check(("--http-port=web",), "--http-port must be a port number", "'web'")

    def test_busy_port(self) -> None:
        with socket.socket() as holder:
            holder.bind(("0.0.0.0", 0))
            holder.listen()
            port = holder.getsockname()[1]
            self.check((f"--http-port={port}",), f"port {port} (HTTP) is in use", "--http-port=")

    def test_no_server_installed(self, tmp_path: Path) -> None:
        (tmp_path / "pytriton.py").write_text("raise ImportError('hidden by the test')\n")
        hidden = {"PYTHONPATH": str(tmp_path), "PATH": "/nonexistent", "GRAPHKILN_TRITONSERVER": ""}
        self.check((), "no tritonserver found", "pip install 'graphkiln[serve]'", env=hidden)

    def check(self, arguments: tuple[str, ...], *expected: str, env: dict[str, str] | None = None) -> None:
        finished = run_command("serve", *arguments, env=env)
        assert finished.returncode == 2, finished.stderr
        assert finished.stdout == ""
        assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
        for text in expected:
            assert text in finished.stderr
