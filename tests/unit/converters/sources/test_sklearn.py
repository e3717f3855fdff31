"""Estimators of scikit-learn: outputs, columns, refused files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io as skops_io
from recipes import recipe
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestRegressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import synthetic_samples
from graphkiln_converters.sources.sklearn import column_inputs, open_source, table_of

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
        pytest.param(KMeans(2).fit(X.astype(np.float32)), ["predict", "transform"], id="takes float32 alone"),
        (DecisionTreeClassifier(max_depth=3).fit(X, WORDS), ["predict", "predict_proba"]),
    ],
)
def test_outputs_are_those_of_the_methods_of_the_estimator(tmp_path: Path, estimator: Any, methods: list[str]) -> None:
    model = open_source(save(estimator, tmp_path), recipe())
    assert list(model.methods.values()) == methods
    feeds = synthetic_samples(model.inputs, 5, {}, seed=3)
    (first, *_) = model.run(feeds).values()
    expected = estimator.predict(feeds["X"].astype(getattr(estimator, "cluster_centers_", X).dtype))
    assert np.allclose(first.ravel(), expected) if first.dtype != np.object_ else first.tolist() == expected.tolist()
    assert [value.name for value in model.export().graph.outputs] == list(model.methods)
    assert not model.notes


def test_outputs_declare_their_targets(tmp_path: Path) -> None:
    forest = RandomForestRegressor(3).fit(X, X[:, :2])
    (output,) = open_source(save(forest, tmp_path), recipe()).graph.graph.output
    assert output.type.tensor_type.shape.dim[1].dim_value == 2


def test_thresholds_that_fp32_crosses_need_fp64_inputs(tmp_path: Path) -> None:
    table = np.repeat(np.linspace(-2, 2, 400)[:, None], 3, axis=1)
    estimator = make_pipeline(StandardScaler(), DecisionTreeClassifier())
    estimator.fit(table, np.random.default_rng(1).integers(0, 2, 400))
    estimator.steps[0][1].mean_ = np.full(3, 1e7)
    estimator.steps[0][1].scale_ = np.full(3, 1e7)
    model = open_source(save(estimator, tmp_path), recipe())
    assert {spec.dtype for spec in model.inputs} <= {DType.FP32, DType.FP64}


def test_an_output_that_matches_no_method_is_left_out(tmp_path: Path) -> None:
    model = open_source(save(SVC().fit(X, X[:, 0] > 0), tmp_path), recipe())
    assert list(model.methods.values()) == ["predict"]
    assert "is left out" in model.notes[0]


def test_types_that_can_run_code_are_listed(tmp_path: Path) -> None:
    path = save(make_pipeline(FunctionTransformer(twice), Ridge()).fit(X, X[:, 0]), tmp_path)
    with pytest.raises(ConversionError, match=r"types that can run code: .*twice.*--allow-code"):
        open_source(path, recipe())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.skops").write_bytes(content)
    with pytest.raises(ConversionError, match="is not an estimator saved by skops"):
        open_source(str(tmp_path / "m.skops"), recipe())


# The columns of an estimator: numbers, categories, documents.

MIXED = np.array([["red", 1.0, "S"], ["blue", 2.0, "L"], ["red", 3.0, "S"]], np.object_)


def test_numbers_are_one_table() -> None:
    estimator = Ridge().fit(np.eye(3), np.ones(3))
    (spec,) = column_inputs(estimator, "m", DType.FP32)
    assert (spec.name, spec.dtype, spec.shape) == ("X", DType.FP32, (3,))
    assert table_of(estimator, (spec,), {"X": np.ones((2, 3), np.float32)}).dtype == np.float64


def test_text_and_numbers_are_separate_columns() -> None:
    transformer = ColumnTransformer([("words", OneHotEncoder(), [0, 2]), ("numbers", StandardScaler(), [1])])
    estimator = make_pipeline(transformer, Ridge()).fit(MIXED, [1, 2, 3])
    specs = column_inputs(estimator, "m", DType.FP64)
    assert [spec.dtype for spec in specs] == [DType.BYTES, DType.FP64, DType.BYTES]
    assert [set(spec.words) for spec in specs if spec.dtype is DType.BYTES] == [{"red", "blue"}, {"S", "L"}]
    feeds = {spec.name: MIXED[:, [number]] for number, spec in enumerate(specs)}
    feeds[specs[1].name] = feeds[specs[1].name].astype(np.float64)
    assert table_of(estimator, specs, feeds).tolist() == MIXED.tolist()


@pytest.mark.parametrize("columns", [[0, -1], [True, False, True], slice(0, 3, 2), ["color", "size"]], ids=str)
def test_text_columns_given_in_every_way_of_scikit_learn(columns: Any) -> None:
    frames = pytest.importorskip("pandas")
    table = frames.DataFrame(MIXED, columns=["color", "price", "size"])
    estimator = ColumnTransformer([("words", OneHotEncoder(), columns)], remainder="passthrough").fit(table)
    specs = column_inputs(estimator, "m", DType.FP64)
    assert [spec.name for spec in specs if spec.dtype is DType.BYTES] == ["color", "size"]


def test_documents_are_one_text_input() -> None:
    estimator = make_pipeline(CountVectorizer(), Ridge()).fit(["red car", "blue car"], [1, 2])
    (spec,) = column_inputs(estimator, "m", DType.FP32)
    assert (spec.name, spec.dtype, spec.shape) == ("text", DType.BYTES, (1,))
    assert {"red", "car", "blue"} <= set(spec.words)
    assert table_of(estimator, (spec,), {"text": np.array([["red"]], np.object_)}).tolist() == ["red"]
