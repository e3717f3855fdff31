"""Estimators of scikit-learn: what their graphs return, and files that are not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io as skops_io
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import SourceOptions, synthetic_samples
from graphkiln_converters.sources.sklearn import open_source

pytestmark = pytest.mark.filterwarnings("ignore")
X = np.random.default_rng(0).normal(size=(100, 3))
WORDS = np.where(X[:, 0] > 0, "yes", "né")


def twice(table: Any) -> Any:
    return table * 2


def save(estimator: Any, folder: Path) -> str:
    skops_io.dump(estimator, folder / "m.skops")
    return str(folder / "m.skops")


@pytest.mark.parametrize(
    ("estimator", "methods"),
    [
        (LogisticRegression().fit(X, WORDS), ["predict", "predict_proba"]),
        (Ridge().fit(X, X[:, 0]), ["predict"]),
        (KMeans(2).fit(X), ["predict", "transform"]),
        (DecisionTreeClassifier(max_depth=3).fit(X, WORDS), ["predict", "predict_proba"]),
    ],
)
def test_outputs_are_those_of_its_own_methods(tmp_path: Path, estimator: Any, methods: list[str]) -> None:
    model = open_source(save(estimator, tmp_path), SourceOptions())
    assert list(model.methods.values()) == methods
    feeds = synthetic_samples(model.inputs, 5, {}, seed=3)
    (first, *_) = model.run(feeds).values()
    expected = estimator.predict(feeds["X"].astype(np.float64))
    assert np.allclose(first.ravel(), expected) if first.dtype != np.object_ else first.tolist() == expected.tolist()
    assert [value.name for value in model.export({}).graph.outputs] == list(model.methods)
    assert not model.notes


def test_thresholds_that_fp32_crosses_take_fp64_inputs(tmp_path: Path) -> None:
    table = np.repeat(np.linspace(-2, 2, 400)[:, None], 3, axis=1)
    estimator = make_pipeline(StandardScaler(), DecisionTreeClassifier())
    estimator.fit(table, np.random.default_rng(1).integers(0, 2, 400))
    estimator.steps[0][1].mean_ = np.full(3, 1e7)
    estimator.steps[0][1].scale_ = np.full(3, 1e7)
    model = open_source(save(estimator, tmp_path), SourceOptions())
    assert {spec.dtype for spec in model.inputs} <= {DType.FP32, DType.FP64}


def test_an_output_that_is_none_of_its_answers_is_left_out(tmp_path: Path) -> None:
    model = open_source(save(SVC().fit(X, X[:, 0] > 0), tmp_path), SourceOptions())
    assert list(model.methods.values()) == ["predict"]
    assert "is left out: it is none of predict" in model.notes[0]


def test_types_that_can_run_code_are_named(tmp_path: Path) -> None:
    path = save(make_pipeline(FunctionTransformer(twice), Ridge()).fit(X, X[:, 0]), tmp_path)
    with pytest.raises(ConversionError, match=r"types that can run code: .*twice.*--allow-code"):
        open_source(path, SourceOptions())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_another_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.skops").write_bytes(content)
    with pytest.raises(ConversionError, match="no estimator that skops saved"):
        open_source(str(tmp_path / "m.skops"), SourceOptions())


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="there is no file"):
        open_source(str(tmp_path / "m.skops"), SourceOptions())
    with pytest.raises(ConversionError, match="not fitted"):
        open_source(save(Ridge(), tmp_path), SourceOptions())
