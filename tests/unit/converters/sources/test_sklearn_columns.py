"""The columns of an estimator: numbers, categories, documents."""

from __future__ import annotations

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.sources.sklearn_columns import column_inputs, table_of

MIXED = np.array([["red", 1.0, "S"], ["blue", 2.0, "L"], ["red", 3.0, "S"]], np.object_)


def test_numbers_are_one_table() -> None:
    estimator = Ridge().fit(np.eye(3), np.ones(3))
    (spec,) = column_inputs(estimator, "m", DType.FP32)
    assert (spec.name, spec.dtype, spec.shape) == ("X", DType.FP32, (3,))
    assert table_of(estimator, (spec,), {"X": np.ones((2, 3), np.float32)}).dtype == np.float64


def test_text_among_numbers_is_a_column_each() -> None:
    transformer = ColumnTransformer([("words", OneHotEncoder(), [0, 2]), ("numbers", StandardScaler(), [1])])
    estimator = make_pipeline(transformer, Ridge()).fit(MIXED, [1, 2, 3])
    specs = column_inputs(estimator, "m", DType.FP64)
    assert [spec.dtype for spec in specs] == [DType.BYTES, DType.FP64, DType.BYTES]
    assert [set(spec.words) for spec in specs if spec.dtype is DType.BYTES] == [{"red", "blue"}, {"S", "L"}]
    feeds = {spec.name: MIXED[:, [number]] for number, spec in enumerate(specs)}
    feeds[specs[1].name] = feeds[specs[1].name].astype(np.float64)
    assert table_of(estimator, specs, feeds).tolist() == MIXED.tolist()


def test_documents_are_one_text_each() -> None:
    estimator = make_pipeline(CountVectorizer(), Ridge()).fit(["red car", "blue car"], [1, 2])
    (spec,) = column_inputs(estimator, "m", DType.FP32)
    assert (spec.name, spec.dtype, spec.shape) == ("text", DType.BYTES, (1,))
    assert {"red", "car", "blue"} <= set(spec.words)
    assert table_of(estimator, (spec,), {"text": np.array([["red"]], np.object_)}).tolist() == ["red"]
