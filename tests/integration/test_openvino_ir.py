"""OpenVINO IR as it lies, in the layouts of Triton and of OpenVINO Model Server, on the real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
import pytest
from ir_files import graph, parameter, product, save_ir
from openvino import opset13
from running import Server, Serving, run_here

from graphkiln_client import Client

pytestmark = pytest.mark.server

FAULTS = {
    "no_weights": r"model.bin, which is missing",
    "cut_short": "is cut short",
    "no_graph": "is not a graph in OpenVINO IR",
    "old": "OpenVINO IR of version 7",
    "text": "is text, which the OpenVINO engine does not take",
    "unreadable": "cannot load",
}


def scalar_and_dynamic() -> openvino.Model:
    x, factor = parameter("x", [-1, -1]), parameter("factor", [], np.int64)
    y = opset13.multiply(x, opset13.convert(factor, "f32"))
    return graph({"y": y.output(0), "sum": opset13.reduce_sum(y, np.array([0, 1])).output(0)}, [x, factor])


def add_faults(store: Path) -> None:
    for name in FAULTS:
        save_ir(product(), store / name / "1" / "model.xml")
    (store / "no_weights" / "1" / "model.bin").unlink()
    (store / "cut_short" / "1" / "model.bin").write_bytes(bytes(7))
    (store / "no_graph" / "1" / "model.xml").write_text("<project/>")
    old = store / "old" / "1" / "model.xml"
    old.write_text(old.read_text().replace('version="11"', 'version="7"'))
    text = parameter("x", [2], openvino.Type.string)
    save_ir(graph({"y": text.output(0)}, [text]), store / "text" / "1" / "model.xml")
    unreadable = store / "unreadable" / "1" / "model.xml"  # to the reader it is sound
    unreadable.write_text(unreadable.read_text().replace('type="MatMul"', 'type="NoSuchOperator"'))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> dict[str, Path]:
    """Model name -> its graph, in a store of Triton (`store`) and one of OpenVINO Model Server (`listed`)."""
    root = tmp_path_factory.mktemp("openvino ir")
    store, listed = root / "store", root / "listed"
    found = {
        "bare": save_ir(digits / "1" / "model.onnx", store / "bare" / "1" / "model.xml", compress=True),
        "backend": save_ir(product(), store / "backend" / "1" / "model.xml"),
        "fixed": save_ir(product((2, 3)), store / "fixed" / "1" / "fixed.xml"),
        "scalars": save_ir(scalar_and_dynamic(), store / "scalars" / "1" / "model.xml"),
        "adopted": save_ir(product(), store / "adopted" / "1" / "model.xml"),
        "listed": save_ir(digits / "1" / "model.onnx", listed / "models" / "any" / "1" / "digits.xml"),
        "versions": save_ir(product(), listed / "models" / "two" / "1" / "net.xml"),
    }
    save_ir(product(scale=2), listed / "models" / "two" / "2" / "net.xml")
    (store / "backend" / "config.pbtxt").write_text('backend: "openvino" max_batch_size: 16')
    finished = run_here("adopt", store / "adopted")
    assert finished.returncode == 0, finished.stderr
    add_faults(store)
    models = [
        {"name": "listed", "base_path": "models/any", "nireq": 2, "plugin_config": {"INFERENCE_NUM_THREADS": 1}},
        {"name": "versions", "base_path": "models/two", "model_version_policy": {"all": {}}},
    ]
    (listed / "config.json").write_text(json.dumps({"model_config_list": [{"config": each} for each in models]}))
    return found


@pytest.fixture(scope="module")
def server(graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stores = (graphs["bare"].parents[2], graphs["listed"].parents[3])
    with Serving(tmp_path_factory.mktemp("serving"), "--model-store", stores[0], "--model-store", stores[1]) as running:
        running.wait_until(lambda: running.status("/v2/health/live") == 200)
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def check_answers(client: Client, graph: Path, name: str, version: str = "", **feeds: np.ndarray) -> None:
    """Compare answers with OpenVINO's own, in fp32."""
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    answers = client.model(name, version).infer(feeds)
    expected = {port.get_any_name(): array for port, array in compiled(feeds).items()}
    assert answers.keys() == expected.keys()
    for output, array in expected.items():
        np.testing.assert_allclose(answers[output].reshape(array.shape), array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bare", "listed"])
def test_digits(client: Client, graphs: dict[str, Path], name: str) -> None:
    images = np.random.default_rng(1).random((3, 1, 32, 32), np.float32)
    check_answers(client, graphs[name], name, INPUT_0=images)


@pytest.mark.parametrize(("name", "rows"), [("backend", 5), ("fixed", 2), ("adopted", 4)])
def test_products(client: Client, graphs: dict[str, Path], name: str, rows: int) -> None:
    check_answers(client, graphs[name], name, x=np.random.default_rng(2).random((rows, 3), np.float32))


def test_scalars_and_dynamic_sizes(client: Client) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    answers = client.model("scalars").infer({"x": x, "factor": np.array([3], np.int64)})
    np.testing.assert_array_equal(answers["y"], 3 * x)
    np.testing.assert_array_equal(answers["sum"], [45])


def test_versions_of_a_policy(client: Client, graphs: dict[str, Path]) -> None:
    x = np.eye(3, dtype=np.float32)
    check_answers(client, graphs["versions"], "versions", "1", x=x)
    newest = graphs["versions"].parents[1] / "2" / "net.xml"
    check_answers(client, newest, "versions", x=x)


def test_settings_and_proofs(server: Server) -> None:
    engines = [name for name in server.metrics() if name.startswith("graphkiln_instance_info")]
    assert {'engine="openvino"' in name for name in engines} == {True}
    assert "nireq has no effect" in server.log
    assert "bare: it has no golden samples, and only OpenVINO reads OpenVINO IR" in server.log
    assert "adopted: it has no golden samples" not in server.log


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_graphs_do_not_serve(server: Server, name: str) -> None:
    assert server.status(f"/v2/models/{name}/ready") == 400
    # A version that fails while it is loaded is reported once the server is ready.
    server.wait_until(lambda: any(FAULTS[name] in line for line in server.log.splitlines() if name in line), 60)


def test_new_versions_of_a_listed_model(tmp_path: Path) -> None:
    model = tmp_path / "listed" / "two"
    save_ir(product(), model / "1" / "net.xml")
    config = {"model_config_list": [{"config": {"name": "two", "base_path": "two"}}]}
    (tmp_path / "listed" / "config.json").write_text(json.dumps(config))
    flags = ("--model-store", tmp_path / "listed", "--model-control-mode=poll", "--repository-poll-secs=1")
    with Serving(tmp_path, *flags) as running:
        running.wait_ready()
        newer = save_ir(product(scale=2), tmp_path / "new" / "net.xml")
        newer.parent.rename(model / "2")
        running.wait_until(lambda: running.status("/v2/models/two/versions/2/ready") == 200)
        damaged = save_ir(product(), tmp_path / "new" / "net.xml")
        damaged.with_suffix(".bin").write_bytes(b"")
        damaged.parent.rename(model / "3")
        running.wait_until(lambda: "two version 3 is not served" in running.log)
        assert "is cut short" in running.log
        with Client(running.url) as client:
            check_answers(client, model / "2" / "net.xml", "two", x=np.eye(3, dtype=np.float32))


def test_explicit_mode(graphs: dict[str, Path], tmp_path: Path) -> None:
    """Triton itself chooses the backend of a `model.xml`."""
    shutil.copytree(graphs["bare"].parents[1], tmp_path / "store" / "bare")
    flags = ("--model-store", tmp_path / "store", "--model-control-mode=explicit", "--load-model=bare")
    with Serving(tmp_path, *flags) as running:
        running.wait_ready()
        with Client(running.url) as client:
            check_answers(client, graphs["bare"], "bare", INPUT_0=np.ones((1, 1, 32, 32), np.float32))
