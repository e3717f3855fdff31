"""Adopted versions on a real server: the backend of each computes its golden samples before clients reach it.

A Python model of Triton stands for any opaque graph.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from graphs import draw
from running import StartServer, run_here

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        weights = np.load(f"{args['model_repository']}/{args['model_version']}/weights.npz")
        self.w, self.b = weights["w"], weights["b"]

    def execute(self, requests):
        feeds = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        outputs = [np.float32(SCALE) * (x @ self.w + self.b) for x in feeds]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in outputs]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def add(store: Path, name: str, *, scale: float, adopt: tuple[str | Path, ...]) -> None:
    """Add a model that computes the reference times `scale`, and adopt it with these options, if any."""
    version = store / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(CODE.replace("SCALE", str(scale)))
    np.savez(version / "weights.npz", w=draw(4, 3), b=draw(3))
    (version.parent / "config.pbtxt").write_text(CONFIG)
    if adopt:
        finished = run_here("adopt", version.parent, *adopt)
        assert finished.returncode == 0, finished.stderr


def test_adopted_versions(tmp_path: Path, start_server: StartServer) -> None:
    reference = tiny.write_source(tmp_path)
    store, options = tmp_path / "store", ("--reference", reference)
    add(store, "right", scale=1, adopt=options)
    add(store, "wrong", scale=1.01, adopt=options)
    add(store, "int8", scale=1.01, adopt=(*options, "--precision", "int8"))
    add(store, "unproven", scale=1.01, adopt=())
    bare = store / "onnx" / "1"
    bare.mkdir(parents=True)
    shutil.copy(reference, bare / "model.onnx")
    assert run_here("adopt", bare, *options).returncode == 0

    server = start_server("--model-store", store)
    server.wait_until(lambda: "serving HTTP" in server.log)
    with Client(server.url) as client:
        served = {model.name: model for model in client.models()}
        assert {name for name, model in served.items() if model.ready} == {"right", "int8", "unproven", "onnx"}
        assert "adopted fp32" in served["wrong"].reason
        x = draw(4, 4, seed=9)
        for name in ("right", "onnx"):
            found = client.model(name).infer({"x": x})["y"]
            np.testing.assert_allclose(found, x @ draw(4, 3) + draw(3), rtol=1e-4, atol=1e-5)
    proven = {name: value for name, value in server.metrics().items() if name.startswith("graphkiln_version_proven")}
    assert proven == {
        'graphkiln_version_proven{model="right",version="1",backend="python",seat=""}': 1,
        'graphkiln_version_proven{model="int8",version="1",backend="python",seat=""}': 1,
        'graphkiln_version_proven{model="unproven",version="1",backend="python",seat=""}': 0,
        'graphkiln_version_proven{model="onnx",version="1",backend="onnxruntime",seat="python"}': 1,
    }
    errors = [name for name in server.metrics() if name.startswith("graphkiln_self_test_error")]
    assert sum('instance="server"' in name for name in errors) == 3
