"""Models of a real MLflow tracking server: logged, registered, converted; and what can be wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from mlflow_server import MlflowServer
from sklearn.linear_model import LogisticRegression

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import
import mlflow
from mlflow.models import infer_signature

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]
DIGITS = Path(__file__).parents[2] / "model_repository/digits/1/model.onnx"
IMAGES = np.random.default_rng(1).normal(size=(3, 1, 32, 32)).astype(np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[MlflowServer]:
    with MlflowServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server.address)
        yield server


@pytest.fixture(scope="module")
def run_id(server: MlflowServer) -> str:  # noqa: ARG001 - it must serve
    """A run with a registered ONNX model, a table model, and a file that is no model."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=["a", "b", "c"])
    estimator = LogisticRegression().fit(table, (table.a > 0).astype(int))
    plain: dict[str, Any] = {"pip_requirements": ["mlflow"]}
    with mlflow.start_run() as run:
        signature = infer_signature(IMAGES, np.zeros((3, 10), np.float32))
        mlflow.onnx.log_model(
            onnx.load(DIGITS), name="graph", registered_model_name="digits", signature=signature,
            input_example=IMAGES, **plain,
        )  # fmt: skip
        mlflow.sklearn.log_model(
            estimator, name="table", signature=infer_signature(table), input_example=table.head(4), **plain
        )
        mlflow.log_text("no model", "notes/text.txt")
    mlflow.MlflowClient().set_registered_model_alias("digits", "champion", "1")
    return str(run.info.run_id)


def converted(source: str, store: Path, **options: Any) -> Path:
    return convert(read_recipe(None, {"source": source, "model_store": str(store), **options}, []), command="test")


def refused(source: str, store: Path, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        converted(source, store, name="m")
    assert not store.exists()


def test_a_registered_model(run_id: str, tmp_path: Path) -> None:
    version = converted("mlflow:models:/digits@champion", tmp_path)
    assert version == tmp_path / "digits" / "1"
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.provenance.source == "mlflow:models:/digits@champion"
    assert manifest.conversion is not None
    assert any("version 1 of 'digits', model m-" in note and run_id in note for note in manifest.conversion.notes)
    golden = GoldenSamples.read(version / "golden.npz")
    assert np.array_equal(golden.inputs["INPUT_0"][:3], IMAGES)
    (model,) = [each for each in mlflow.search_logged_models(output_format="list") if each.name == "graph"]
    again = converted(f"mlflow:models:/{model.model_id}", tmp_path, name="digits")
    assert Manifest.read(again / "manifest.json").sha256 == manifest.sha256


def test_a_model_of_a_run(run_id: str, tmp_path: Path) -> None:
    version = converted(f"mlflow:runs:/{run_id}/table", tmp_path, keep_names=True)
    manifest = Manifest.read(version / "manifest.json")
    assert version.parent.name == "table"
    assert [spec.name for spec in manifest.signature.inputs] == ["X"]
    assert "columns of X: a, b, c" in (manifest.conversion.notes if manifest.conversion else ())


def test_models_that_do_not_exist(run_id: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    refused("mlflow:models:/digits/7", store, "it has digits/1, digits@champion")
    refused("mlflow:models:/digit/1", store, "did you mean 'digits'")
    refused("mlflow:models:/digits@best", store, "digits@best")
    refused(f"mlflow:models:/m-{'0' * 32}", store, "no logged model")
    refused(f"mlflow:runs:/{'0' * 32}/graph", store, "there is no run")
    refused(f"mlflow:runs:/{run_id}/net", store, "it has .*table")
    refused(f"mlflow:runs:/{run_id}/notes", store, "no file MLmodel")
    with mlflow.start_run() as empty:
        pass
    refused(f"mlflow:runs:/{empty.info.run_id}/model", store, "logged no model")


def test_artifacts_that_are_truncated(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    (file,) = server.artifacts.glob("**/model.skops")
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[: len(whole) // 2])
        refused(f"mlflow:runs:/{run_id}/table", tmp_path / "store", r"runs:/\w+/table is incomplete")
        file.unlink()
        refused(f"mlflow:runs:/{run_id}/table", tmp_path / "store", "is incomplete")
    finally:
        file.write_bytes(whole)


def test_a_server_that_has_stopped(server: MlflowServer, run_id: str, tmp_path: Path) -> None:
    server.stop()  # the last test of this file
    refused(f"mlflow:runs:/{run_id}/graph", tmp_path / "store", "MLflow at http:")
