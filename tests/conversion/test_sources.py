"""Whole conversions of torch.jit, scikit-learn, Keras and XGBoost."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from converting import Convert

from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.convolution(x)
        for _ in range(2):
            found = torch.relu(found + 1)
        return found.mean((2, 3))


class Mixing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x - 1


def test_torchscript(run: Convert, tmp_path: Path) -> None:
    torch.jit.script(Net().eval()).save(tmp_path / "scripted.pt")  # type: ignore[no-untyped-call]
    torch.jit.trace(Net().eval(), torch.rand(1, 3, 8, 8)).save(tmp_path / "traced.pt")  # type: ignore[no-untyped-call]
    for name in ("scripted", "traced"):
        version = run(f"torchscript:{tmp_path / name}.pt", name, shape=["3x8x8"])
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.signature.batchable
        assert "torch" in manifest.provenance.versions


def test_a_branch_on_the_whole_batch_is_refused(run: Convert, tmp_path: Path) -> None:
    torch.jit.script(Mixing()).save(tmp_path / "m.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(VerificationError, match="the outputs changed"):
        run(f"torchscript:{tmp_path / 'm.pt'}", shape=["4"])


def test_sklearn(run: Convert, tmp_path: Path) -> None:
    import skops.io
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    generator = np.random.default_rng(0)
    table = np.empty((90, 2), np.object_)
    table[:, 0], table[:, 1] = generator.choice(["red", "blue"], 90), generator.normal(size=90)
    transformer = ColumnTransformer([("w", OneHotEncoder(), [0]), ("n", StandardScaler(), [1])])
    estimator = make_pipeline(transformer, RandomForestClassifier(5, random_state=0))
    estimator.fit(table, np.where(table[:, 0] == "red", "warm", "kühl"))
    skops.io.dump(estimator, tmp_path / "m.skops")
    manifest = Manifest.read(run(str(tmp_path / "m.skops")) / "manifest.json")
    assert [spec.dtype for spec in manifest.signature.outputs] == ["BYTES", "FP32"]
    assert {"scikit-learn", "skl2onnx", "skops"} <= set(manifest.provenance.versions)


@pytest.mark.slow
def test_keras(run: Convert, tmp_path: Path) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    keras.Sequential(layers).save(tmp_path / "m.keras")
    manifest = Manifest.read(run(str(tmp_path / "m.keras")) / "manifest.json")
    assert manifest.verification[0].verdict.endswith("PASS")
    assert "keras" in manifest.provenance.versions


def test_an_export_of_xgboost_with_recorded_outputs(run: Convert, tmp_path: Path) -> None:
    boosting = pytest.importorskip("xgboost", reason="xgboost is not installed")
    tools = pytest.importorskip("onnxmltools", reason="onnxmltools is not installed")
    from onnxmltools.convert.common.data_types import FloatTensorType

    table = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    estimator = boosting.XGBClassifier(n_estimators=5).fit(table, (table[:, 0] > 0).astype(int))
    graph = tools.convert_xgboost(estimator, initial_types=[("X", FloatTensorType([None, 4]))], target_opset=15)
    onnx.save(graph, tmp_path / "m.onnx")
    recorded = {"OUTPUT_0": estimator.predict(table).astype(np.int64), "OUTPUT_1": estimator.predict_proba(table)}
    np.savez(tmp_path / "r.npz", INPUT_0=table, **recorded)
    manifest = Manifest.read(run(str(tmp_path / "m.onnx"), reference=str(tmp_path / "r.npz")) / "manifest.json")
    assert manifest.verification[0].samples in {6, 200}
