"""A server with trusted keys: unsigned and altered versions do not go live."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import zoo
from factors import factor
from running import Server, StartServer
from signed import make_key

from graphkiln import Client, ClientError
from graphkiln_backend.repository.signing import sign_version
from graphkiln_backend.repository.signing_keys import SigningKey

pytestmark = [pytest.mark.server, pytest.mark.slow]

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
OTHERS_MODEL = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(each, "x")]) for each in requests]
"""
OTHERS_CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [3] }
output { name: "x" data_type: TYPE_FP32 dims: [3] }
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [3] }
output { name: "y" data_type: TYPE_FP32 dims: [3] }
ensemble_scheduling { step { model_name: "swap" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


def publish(store: Path, version: int, proto: onnx.ModelProto, key: SigningKey | None) -> None:
    """Add a complete version of `swap`, signed or not, by one rename."""
    zoo.add(store / ".new", "swap", proto, version=version)
    if key:
        sign_version(store / ".new" / "swap", version, key)
    (store / ".new" / "swap" / str(version)).rename(store / "swap" / str(version))


def write_model(folder: Path, config: str, files: dict[str, str]) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    for name, text in files.items():
        (folder / "1" / name).write_text(text)


def test_poll_mode_untrusted_models_and_a_restart(start_server: StartServer, tmp_path: Path) -> None:
    key, public = make_key(tmp_path / "release")
    store = tmp_path / "store"
    zoo.add(store, "swap", zoo.scale(("batch", 3), 1))
    zoo.add(store, "unsigned", zoo.scale(("batch", 3), 7))
    write_model(store / "both", ENSEMBLE, {})
    write_model(store / "theirs", OTHERS_CONFIG, {"model.py": OTHERS_MODEL})
    write_model(store / "planted", OTHERS_CONFIG, {"model.py": OTHERS_MODEL})
    for model in ("swap", "both", "theirs"):
        sign_version(store / model, 1, key)
    server = start_server("--model-store", store, "--trusted-keys", public, *POLL)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert (factor(server), factor(server, "both")) == (1, 1), server.log
    assert server.status("/v2/health/ready") == 400
    for model, serves in (("theirs", True), ("unsigned", False), ("planted", False)):
        assert (server.status(f"/v2/models/{model}/ready") == 200) is serves
    assert "unsigned version 1 is not served: it is not signed" in server.log
    assert "planted version 1 is not served: it is not signed" in server.log

    for model in ("unsigned", "planted"):
        sign_version(store / model, 1, key)
    server.wait_until(lambda: server.status("/v2/health/ready") == 200)
    assert factor(server, "unsigned") == 7

    publish(store, 2, zoo.scale(("batch", 3), 2), None)
    server.wait_until(lambda: "swap version 2 is not served: it is not signed" in server.log)
    publish(store, 3, zoo.scale(("batch", 3), 3), key)
    server.wait_until(lambda: factor(server) == 3)
    onnx.save(zoo.scale(("batch", 3), 9), store / "swap" / "3" / "model.onnx")
    server.wait_until(lambda: "swap version 3: 3/model.onnx is not the file that was signed" in server.log)
    assert "the verified copy keeps serving" in server.log
    restart(server)
    assert factor(server) == 3


def restart(server: Server) -> None:
    """Kill tritonserver and wait until the supervisor has restarted it."""
    import psutil

    def tritonservers() -> list[psutil.Process]:
        children = psutil.Process(server.process.pid).children(recursive=True)
        return [each for each in children if each.is_running() and each.name() == "tritonserver"]

    (before,) = tritonservers()
    before.kill()
    server.wait_until(lambda: any(each.pid != before.pid for each in tritonservers()))
    server.wait_ready()


def test_explicit_mode(start_server: StartServer, tmp_path: Path) -> None:
    key, public = make_key(tmp_path / "release")
    store = tmp_path / "store"
    for model in ("swap", "unsigned"):
        zoo.add(store, model, zoo.scale(("batch", 3), 1))
    sign_version(store / "swap", 1, key)
    explicit = ("--model-control-mode=explicit", "--repository-poll-secs=1")
    server = start_server("--model-store", store, "--trusted-keys", public, *explicit)
    server.wait_until(lambda: server.status("/v2/health/live") == 200)
    with Client(server.url) as client:
        client.load("swap")
        assert factor(server) == 1
        with pytest.raises(ClientError, match="it is not signed"):
            client.load("unsigned")
        publish(store, 2, zoo.scale(("batch", 3), 2), None)
        client.load("swap")
        assert factor(server) == 1
        sign_version(store / "swap", 2, key)
        server.wait_until(lambda: "swap version 2 is signed by release" in server.log)
        server.wait_until(lambda: client.load("swap") is None and factor(server) == 2)
