"""Repositories of oneflow-serving, unmodified and read-only, with its clients, on the real server, without OneFlow."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import saved_graphs
import tritonclient.http as theirs
from running import Server, Serving, StartServer, run_here

from graphkiln_client import Client

pytestmark = pytest.mark.server

# As in oneflow-serving's examples.
CONFIG = """name: "{name}"
backend: "oneflow"
max_batch_size: {largest}
input [
  {{
    name: "INPUT_0"
    data_type: TYPE_FP32
    dims: [ 3, 16, 16 ]
  }}
]
output [
  {{
    name: "OUTPUT_0"
    data_type: TYPE_FP32
    dims: [ 10 ]
    label_filename: "labels.txt"
  }}
]
instance_group [
  {{
    count: 1
    kind: KIND_CPU
  }}
]
parameters {{
  key: "xrt"
  value: {{
    string_value: "{xrt}"
  }}
}}
"""


def add_model(store: Path, name: str, graph: str, config: str = "") -> Path:
    """Write `NAME/1/model/model.mlir` as `flow.save` does; return the folder of the reference."""
    version = store / name / "1"
    version.mkdir(parents=True)
    unpacked = saved_graphs.unpack("models.zip", store.parent / f"unpacked {name}", graph) / graph
    (unpacked / "model").rename(version / "model")
    (store / name / "labels.txt").write_text("".join(f"label {index}\n" for index in range(10)))
    if config:
        (store / name / "config.pbtxt").write_text(config)
    return unpacked


def freeze(store: Path) -> None:
    """Make a folder read-only."""
    for path in sorted(store.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    store.chmod(0o555)


def digest(store: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """OneFlow's outputs by model name; `store` is the folder of the models."""
    store = tmp_path_factory.mktemp("oneflow repository") / "store"
    store.mkdir()
    found = {
        "cnn": add_model(store, "cnn", "cnn", CONFIG.format(name="cnn", largest=4, xrt="oneflow")),
        "cnn_openvino": add_model(
            store, "cnn_openvino", "cnn", CONFIG.format(name="cnn_openvino", largest=1, xrt="openvino")
        ),
        "bare": add_model(store, "bare", "several_ends"),
    }
    freeze(store)
    return {**found, "store": store}


@pytest.fixture(scope="module")
def server(references: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("oneflow")
    before = digest(references["store"])
    with Serving(folder, "--model-store", references["store"], "--cache", folder / "cache") as running:
        running.wait_ready()
        yield running
    assert digest(references["store"]) == before


def ask(server: Server, model: str, reference: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the server's outputs for OneFlow's inputs with tritonclient, and OneFlow's outputs."""
    inputs, expected = saved_graphs.reference(reference)
    rows = 1 if model == "cnn_openvino" else 2
    client = theirs.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    sent = []
    for name, array in inputs.items():
        sent.append(theirs.InferInput(name, [rows, *array.shape[1:]], "FP32"))
        sent[-1].set_data_from_numpy(array[:rows])
    answer = client.infer(model, sent)
    client.close()
    return {name: answer.as_numpy(name) for name in expected}, {name: a[:rows] for name, a in expected.items()}


class TestUnmodified:
    @pytest.mark.parametrize("model", ["cnn", "cnn_openvino", "bare"])
    def test_outputs_equal_oneflow(self, server: Server, references: dict[str, Path], model: str) -> None:
        found, expected = ask(server, model, references[model])
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)

    def test_oneflow_client_classification(self, server: Server, references: dict[str, Path]) -> None:
        inputs, expected = saved_graphs.reference(references["cnn"])
        client = theirs.InferenceServerClient(f"127.0.0.1:{server.http_port}")
        sent = theirs.InferInput("INPUT_0", [1, 3, 16, 16], "FP32")
        sent.set_data_from_numpy(inputs["INPUT_0"][:1])
        answer = client.infer("cnn", [sent], outputs=[theirs.InferRequestedOutput("OUTPUT_0", class_count=1)])
        client.close()
        best = int(expected["OUTPUT_0"][0].argmax())
        (text,) = answer.as_numpy("OUTPUT_0").ravel()
        score, index, label = text.decode().split(":")
        assert float(score) == pytest.approx(float(expected["OUTPUT_0"][0].max()), rel=1e-4)
        assert (int(index), label) == (best, f"label {best}")

    def test_xrt_parameter(self, server: Server) -> None:
        metrics = [name for name in server.metrics() if name.startswith("graphkiln_instance_info")]
        engines = {name.split('model="')[1].split('"')[0]: name.split('engine="')[1].split('"')[0] for name in metrics}
        assert engines["cnn"] == "onnxruntime"
        assert engines["cnn_openvino"] == "openvino"

    def test_batches_of_any_size(self, server: Server, references: dict[str, Path]) -> None:
        inputs, expected = saved_graphs.reference(references["cnn"])
        rows = np.concatenate([inputs["INPUT_0"], inputs["INPUT_0"][:1]])
        client = theirs.InferenceServerClient(f"127.0.0.1:{server.http_port}")
        sent = theirs.InferInput("INPUT_0", list(rows.shape), "FP32")
        sent.set_data_from_numpy(rows)
        found = client.infer("cnn", [sent]).as_numpy("OUTPUT_0")
        client.close()
        np.testing.assert_allclose(found[[0, 1, 2]], expected["OUTPUT_0"][[0, 1, 0]], rtol=1e-4, atol=1e-5)

    def test_each_model_is_converted_once(self, server: Server, references: dict[str, Path], tmp_path: Path) -> None:
        assert server.log.count("saved by OneFlow, into") == 2, "cnn and cnn_openvino are the same graph"
        cache = server.log_path.parent / "cache"
        with Serving(tmp_path, "--model-store", references["store"], "--cache", cache) as second:
            second.wait_ready()
            assert "converting" not in second.log
            found, expected = ask(second, "bare", references["bare"])
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
class TestOtherWays:
    def test_loaded_on_demand(self, start_server: StartServer, tmp_path: Path) -> None:
        reference = add_model(tmp_path / "store", "swin", "swin", 'backend: "oneflow"\n')
        flags = ("--model-control-mode", "explicit", "--cache", tmp_path / "cache")
        server = start_server("--model-store", tmp_path / "store", *flags)
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        with Client(server.url) as client:
            client.load("swin")
        found, expected = ask(server, "swin", reference)
        np.testing.assert_allclose(found["OUTPUT_0"], expected["OUTPUT_0"], rtol=1e-4, atol=1e-5)

    def test_without_a_cache(self, references: dict[str, Path], start_server: StartServer) -> None:
        server = start_server("--model-store", references["store"], "--cache", "off")
        server.wait_ready()
        found, expected = ask(server, "bare", references["bare"])
        np.testing.assert_allclose(found["OUTPUT_2"], expected["OUTPUT_2"], rtol=1e-4, atol=1e-5)

    def test_damaged_graph_does_not_stop_other_models(self, start_server: StartServer, tmp_path: Path) -> None:
        store = tmp_path / "store"
        store.mkdir()
        good = add_model(store, "good", "cnn", CONFIG.format(name="good", largest=4, xrt="oneflow"))
        add_model(store, "bad", "cnn", CONFIG.format(name="bad", largest=4, xrt="oneflow"))
        (store / "bad" / "1" / "model" / "m.classes.weight" / "out").write_bytes(b"short")
        server = start_server("--model-store", store, "--exit-on-error=false", "--cache", tmp_path / "cache")
        server.wait_until(lambda: server.status("/v2/models/good/ready") == 200)
        found, expected = ask(server, "good", good)
        np.testing.assert_allclose(found["OUTPUT_0"], expected["OUTPUT_0"], rtol=1e-4, atol=1e-5)
        with Client(server.url) as client:
            states = {each.name: each for each in client.models()}
        assert "state tensor 'm.classes.weight'" in states["bad"].reason
        with pytest.raises(HTTPError):
            urlopen(f"{server.url}/v2/models/bad")

    def test_stop_during_conversion(self, references: dict[str, Path], tmp_path: Path) -> None:
        """`Serving` checks that no process is left."""
        flags = ("--model-store", references["store"], "--cache", tmp_path / "cache")
        with Serving(tmp_path, *flags) as server:
            server.wait_until(lambda: "converting" in server.log)
            code, seconds = server.stop(signal.SIGTERM)
        assert code == 0
        assert seconds < 30
        assert "stopped before the server was started" in server.log
        deadline = time.monotonic() + 10
        while any((tmp_path / "cache" / "partial").glob("*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any((tmp_path / "cache" / "partial").glob("*"))

    def test_commands(self, references: dict[str, Path], tmp_path: Path) -> None:
        cache = ("--cache", tmp_path / "cache")
        lowered = run_here("lower", references["store"] / "cnn", *cache)
        assert lowered.returncode == 0, lowered.stderr
        assert "converting cnn 1, saved by OneFlow" in lowered.stderr
        explained = run_here("explain", references["store"] / "cnn", *cache)
        assert explained.returncode == 0, explained.stderr
        assert "converting" not in explained.stderr
        assert "PASS" in explained.stdout
        listed = run_here("cache", "list", *cache)
        assert "oneflow-" in listed.stdout
        inspected = run_here("inspect", references["store"] / "cnn")
        assert inspected.returncode != 0
        assert "graph saved by OneFlow" in inspected.stderr
        assert "graphkiln convert oneflow:" in inspected.stderr
