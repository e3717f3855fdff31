"""Names of inputs and outputs: two inputs of one type are swapped in silence if their names say nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pandas as pd
import pytest
import skops.io
from converting import Convert
from graphs import graph
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.manifest import Manifest


def outputs(version: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
        return session.run(feeds)


@pytest.fixture
def masked(tmp_path: Path) -> str:
    """Sums of the ids that a mask lets through."""
    text = "(int64[b,n] ids, int64[b,n] mask) => (int64[b,1] total) { m = Mul(ids, mask) total = ReduceSum(m, one) }"
    onnx_ir.save(graph(text, one=np.array([1])), tmp_path / "masked.onnx")
    return str(tmp_path / "masked.onnx")


def test_names_of_an_onnx_file(run: Convert, masked: str) -> None:
    version = run(masked)
    signature = Manifest.read(version / "manifest.json").signature
    assert [*map(str, (*signature.inputs, *signature.outputs))] == [
        "ids INT64[b,n]", "mask INT64[b,n]", "total INT64[b,1]"
    ]  # fmt: skip
    ids, mask = np.array([[3, 4, 5]]), np.array([[1, 0, 1]])
    np.testing.assert_array_equal(outputs(version, {"mask": mask, "ids": ids})["total"], [[8]])


def test_names_of_a_table_with_a_column_like_an_output(run: Convert, tmp_path: Path) -> None:
    """skl2onnx calls an output `output_label`, and this table a column; it also changes spaces."""
    table = pd.DataFrame(
        {"output_label": ["a", "b", "c"] * 30, "größe (cm)": np.arange(90.0), "x": np.arange(90.0) % 7}
    )
    words = make_column_transformer((OneHotEncoder(), ["output_label"]), remainder="passthrough")
    estimator = make_pipeline(words, LogisticRegression()).fit(table, table["x"] > 2)
    skops.io.dump(estimator, tmp_path / "m.skops")
    version = run(str(tmp_path / "m.skops"))
    signature = Manifest.read(version / "manifest.json").signature
    assert [spec.name for spec in signature.inputs] == ["output_label", "größe (cm)", "x"]
    names = [spec.name for spec in signature.outputs]
    assert not {*names} & {*table}
    feeds = {name: table[[name]].to_numpy(np.float32 if name != "output_label" else object) for name in table}
    np.testing.assert_allclose(outputs(version, feeds)[names[1]], estimator.predict_proba(table), atol=1e-5)


def test_on_request_tensors_are_numbered(run: Convert, masked: str) -> None:
    signature = Manifest.read(run(masked, keep_names=False) / "manifest.json").signature
    assert [spec.name for spec in (*signature.inputs, *signature.outputs)] == ["INPUT_0", "INPUT_1", "OUTPUT_0"]
