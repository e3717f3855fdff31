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
import tritonclient.grpc
from examples import CPU, tensors
from running import Server, StartServer, run_command

from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client

pytestmark = pytest.mark.server

SHARED_MEMORY = Path("/dev/shm")


def slow_rounds(server: Server, seconds: float) -> int:
    """Number of rounds of the `slow` model that take about that long on this machine."""
    with Client(server.url) as client:
        model = client.model("slow")
        model.infer({"ROUNDS": np.array([[200]])})
        begun = time.perf_counter()
        model.infer({"ROUNDS": np.array([[2000]])})
        return int(2000 * seconds / (time.perf_counter() - begun))


class Asker(threading.Thread):
    """Ask the slow model once, in the background."""

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


def test_prints_a_table_of_models(server: Server) -> None:
    server.wait_until(lambda: "serving HTTP" in server.log)
    row = next(line for line in server.log.splitlines() if "digits" in line and "│" in line)
    assert "onnxruntime on cpu" in row
    assert "fp32" in row
    assert " ms" in row
    assert sum("precision" in line and "┃" in line for line in server.log.splitlines()) == 1
    assert max(len(line) for line in server.log.splitlines() if "│" in line) <= 80


def test_sigterm_with_idle_clients_leaves_nothing_behind(
    start_server: StartServer, digits: Path, tmp_path: Path
) -> None:
    """Serves the working directory's `model_repository`. `tests/image` checks the duration on an idle machine."""
    shutil.copytree(digits, tmp_path / "model_repository" / "digits")
    server = start_server("--drain=60", cwd=tmp_path)
    server.wait_ready()
    assert server.status("/v2/models/digits/ready") == 200
    children = psutil.Process(server.process.pid).children(recursive=True)
    run_folder = next(server.temporary.iterdir())
    regions = list(SHARED_MEMORY.glob(f"triton_python_backend_shm_region_{run_folder.name}-*"))
    assert children
    assert regions, "the prefix of the run's shared memory has changed: the check below would see nothing"
    idle = [http.client.HTTPConnection("127.0.0.1", server.http_port) for _ in range(3)]
    for connection in idle:
        connection.request("GET", "/v2")
        connection.getresponse().read()
    code, seconds = server.stop()
    assert code == 0, server.log
    assert seconds < 30
    for connection in idle:
        connection.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not run_folder.exists()
    assert not [region for region in regions if region.exists()]


def test_python_models_of_others_are_finalized(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    """Triton promises `finalize` at the end of the server; a user's model may write what it has collected."""
    store = tmp_path / "store"
    shutil.copytree(digits, store / "digits")
    (store / "collecting" / "1").mkdir(parents=True)
    both = tensors("input", "IN", "TYPE_FP32", "1") + tensors("output", "OUT", "TYPE_FP32", "1")
    (store / "collecting" / "config.pbtxt").write_text(f'backend: "python" {both} {CPU}')
    (store / "collecting" / "1" / "model.py").write_text(
        f"""
import pathlib, time

class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]

    def finalize(self):
        time.sleep(1)
        pathlib.Path({str(tmp_path / "collected")!r}).write_text("all")
"""
    )
    server = start_server("--model-store", store)
    server.wait_ready()
    code, _ = server.stop()
    assert code == 0, server.log
    assert (tmp_path / "collected").read_text() == "all"


def test_own_models_are_not_waited_for(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    """They have nothing to complete, and Triton calls `finalize` a second after the signal."""
    shutil.copytree(digits, tmp_path / "store" / "digits")
    with (tmp_path / "store" / "digits" / "config.pbtxt").open("a") as config:
        config.write(f"\n{ACCEPT_IMAGES_LINE}\n")
    server = start_server("--model-store", tmp_path / "store", "--log-verbose=1", "--log-info=true")
    server.wait_ready()
    assert server.status("/v2/models/digits.images/ready") == 200
    assert server.stop()[0] == 0
    assert "Timeout 29:" not in server.log, "tritonserver counts the seconds that it waits for models"


def test_requests_in_flight_are_answered_before_the_end(start_server: StartServer, slow_store: Path) -> None:
    server = start_server("--model-store", slow_store, "--drain=60")
    server.wait_ready()
    rounds = slow_rounds(server, seconds=1.5)
    askers = [Asker(url, rounds) for url in (server.url, server.grpc_url)]  # one is computed, one waits
    computed_s = server.computed_s()
    for asker in askers:
        asker.start()
    server.wait_computing(computed_s)
    code, seconds = server.stop()
    for asker in askers:
        asker.join(60)
    assert [asker.answer for asker in askers] == [256.0, 256.0], server.log
    assert code == 0, server.log
    assert seconds > 1


def test_second_signal_ends_at_once(start_server: StartServer, slow_store: Path) -> None:
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


def test_exit_on_error(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "store" / "digits")
    manifest = tmp_path / "store" / "digits" / "1" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["signatur"] = document.pop("signature")
    manifest.write_text(json.dumps(document))
    server = start_server("--model-store", tmp_path / "store", "--exit-on-error=true")
    assert server.process.wait(60) == 1
    assert "unknown key 'signatur' (did you mean 'signature'?)" in server.log


def test_several_stores_spaces_no_http_and_triton_flags(
    start_server: StartServer, slow_store: Path, digits: Path
) -> None:
    assert " " in str(slow_store)
    flags = ("--allow-http=false", "--id=kiln 7, a=b")
    server = start_server("--model-store", slow_store, f"--model-store={digits.parent}", *flags)
    server.wait_until(lambda: "serving gRPC" in server.log)
    with Client(server.grpc_url) as client:
        assert client.ready()
        assert client.model("slow").infer({"ROUNDS": np.array([[3]])})["SUM"][0, 0] == 256.0
        assert sorted(model.name for model in client.models()) == ["digits", "slow"]
    with tritonclient.grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as plain:
        assert plain.get_server_metadata().name == "kiln 7, a=b"
    assert server.stop()[0] == 0


class TestMistakes:
    """Each is one line with a hint, and exit code 2."""

    def test_unknown_flag(self) -> None:
        self.check(("--http-prt=9",), "'--http-prt'", "did you mean '--http-port'?")

    def test_stray_argument(self) -> None:
        self.check(("models",), "unexpected argument 'models'", "--model-store models")

    def test_flag_without_value(self) -> None:
        self.check(("--log-file",), "--log-file needs a value")

    def test_missing_folder(self) -> None:
        self.check(("--model-store", "nowhere"), "'nowhere' is missing", "--model-store DIR")

    def test_invalid_port(self) -> None:
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
