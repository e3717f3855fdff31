"""ONNX files with a fixed batch, a batch on another axis, or none: batched if rows are independent, else whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from converting import Convert
from graphs import draw, graph

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import CONFIG_FILE, ModelVersion, read_version
from graphkiln_converters.verify import verify

WEIGHTS = {"w": draw(1, 8, 3), "r": draw(1, 8, 2, seed=1), "zero": np.array([0]), "one": np.array([1])}
WHOLE: dict[str, tuple[str, str]] = {
    "softmax over the batch": ("(float[2,4] x) => (float[2,4] y) { y = Softmax<axis=0>(x) }", "works along the batch"),
    "rows that mix, though the batch varies": (
        "(float[n,4] x) => (float[n,4] y) { m = ReduceMean<keepdims=1>(x, zero) y = Sub(x, m) }",
        "reduces over the rows",
    ),
    "time first": (
        "(float[time,batch,3] x) => (float[time,1,batch,2] y) { y, h = LSTM<hidden_size=2>(x, w, r) }",
        "steps through time along the rows",
    ),
    "states": (
        """(float[5,1,3] x, float[1,1,2] h, float[1,1,2] c) => (float[5,1,1,2] y, float[1,1,2] hn, float[1,1,2] cn) {
            y, hn, cn = LSTM<hidden_size=2>(x, w, r, , , h, c)
        }""",
        "no common batch",
    ),
    "anchors that all rows share": (
        "(float[1,4] x, float[6,4] anchors) => (float[6,4] y) { y = Sub(anchors, x) }",
        "no common batch",
    ),
    "a threshold": ("(float[1,4] x, float threshold) => (bool[1,4] y) { y = Greater(x, threshold) }", "no common"),
    "scalars": ("(float x) => (float y) { y = Exp(x) }", "no common batch"),
    "no inputs": ("() => (float[2] y) { y = Constant <value = float[2] {1.0, 2.0}> () }", "no common batch"),
    "no inputs in common sizes": (
        "(float[3] x, float[n] z) => (float[3] y) { s = ReduceSum<keepdims=0>(z) y = Add(x, s) }",
        "no common batch",
    ),
    "a size that depends on the data": (
        "(float[1,9] x) => (int64[2,n] y) { g = Greater(x, half) y = NonZero(g) }",
        "no common batch",
    ),
}


def write(folder: Path, text: str, **weights: Any) -> str:
    model = graph(text, **{name: array for name, array in WEIGHTS.items() if name in text.split("{", 1)[1]}, **weights)
    onnx_ir.save(model, folder / "m.onnx")
    return str(folder / "m.onnx")


def notes(version: ModelVersion) -> str:
    assert version.manifest
    assert version.manifest.conversion
    return " ".join(version.manifest.conversion.notes)


@pytest.mark.parametrize("kind", WHOLE)
def test_graphs_without_independent_rows_are_served_whole(run: Convert, tmp_path: Path, kind: str) -> None:
    text, reason = WHOLE[kind]
    folder = run(write(tmp_path, text, **({"half": np.float32(0.5)} if "half" in text else {})))
    version, config = read_version(folder), read_config(folder.parent / CONFIG_FILE)
    assert reason in notes(version)
    assert config.max_batch_size == 0
    assert [len(tensor.dims) for tensor in config.input] == [
        max(1, len(s.shape)) for s in version.manifest.signature.inputs
    ]  # type: ignore[union-attr]
    assert version.golden
    assert version.golden.whole
    for engine in ("onnxruntime", "openvino"):
        assert all(
            "PASS" in verdict.verdict
            for verdict in verify(version, engine=engine, precision=None, samples=None, threads=1).verdicts
        )


def deployment(folder: Path, max_batch_size: int) -> Deployment:
    resources = Resources(device=CPU, cores=1, probe=lambda *_: OnnxRuntimeEngine().probe(CPU))
    return Deployment.read(folder, ModelConfig(name="m", max_batch_size=max_batch_size), resources)


def test_a_graph_proven_whole_is_never_batched(run: Convert, tmp_path: Path) -> None:
    folder = run(write(tmp_path, WHOLE["time first"][0]))
    deployment(folder, 0)
    with pytest.raises(RepositoryError, match="max_batch_size is 8"):
        deployment(folder, 8)


def test_a_fixed_batch_can_be_requested(run: Convert, tmp_path: Path) -> None:
    source = write(tmp_path, "(float[3,4] x) => (float[3,4] y) { y = Relu(x) }")
    fixed = read_version(run(source, batch="fixed"))
    assert "--batch fixed" in notes(fixed)
    assert fixed.manifest
    assert fixed.manifest.signature.inputs[0].shape == (3, 4)
    freed = read_version(run(source, name="freed"))
    assert freed.manifest
    assert freed.manifest.signature.inputs[0].shape == ("batch", 4)
    assert freed.manifest.verification[0].batch_sizes == (1, 5)


def test_int8_of_a_whole_graph(run: Convert, tmp_path: Path) -> None:
    source = write(tmp_path, "(float[3,4] x) => (float[3,5] y) { y = MatMul(x, v) }", v=draw(4, 5))
    np.savez(tmp_path / "calibration.npz", x=draw(6, 3, 4))
    np.savez(tmp_path / "samples.npz", x=draw(5, 3, 4, seed=1))
    np.savez(tmp_path / "one.npz", x=draw(3, 4, seed=2))
    np.savez(tmp_path / "own.npz", INPUT_0=draw(2, 3, 4, seed=3))
    for number, name in enumerate(("samples", "one")):
        files = {"calibration": str(tmp_path / "calibration.npz"), "samples": str(tmp_path / f"{name}.npz")}
        int8 = {"precision": "int8", "int8_by": "onnxruntime", **files}
        version = read_version(run(source, name=f"m{number}", batch="fixed", **int8))
        assert "1/1 products in int8" in notes(version)
        assert verify(version, engine="onnxruntime", precision=None, samples=tmp_path / "own.npz", threads=1).verdicts


def test_int8_of_a_batch_made_dynamic(run: Convert, tmp_path: Path) -> None:
    source = write(tmp_path, "(float[1,4] x) => (float[1,5] y) { y = MatMul(x, v) }", v=draw(4, 5))
    np.savez(tmp_path / "calibration.npz", x=draw(20, 4))
    int8 = {"precision": "int8", "int8_by": "onnxruntime", "calibration": str(tmp_path / "calibration.npz")}
    version = read_version(run(source, **int8))
    assert version.manifest
    assert version.manifest.signature.batchable
