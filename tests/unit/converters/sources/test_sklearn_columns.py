"""The columns of an estimator: numbers, categories, documents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.sources.sklearn import column_inputs, table_of

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


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ([0, -1], [True, False, True]),
        ([True, False, True], [True, False, True]),
        (np.array([False, False, True]), [False, False, True]),
        (["color", "size"], [True, False, True]),
        ("size", [False, False, True]),
        (2, [False, False, True]),
        (slice(0, 3, 2), [True, False, True]),
        (slice("price", "size"), [False, True, True]),
        (slice(None, "price"), [True, True, False]),
        (slice(-1, None), [False, False, True]),
    ],
    ids=str,
)
def test_columns_in_every_way_that_scikit_learn_takes(columns: Any, text: list[bool]) -> None:
    """What a ColumnTransformer keeps of a table with named columns, which takes pandas to fit."""
    words = OneHotEncoder().fit(MIXED[:, [0] * sum(text)])
    estimator = SimpleNamespace(
        transformers_=[("words", words, columns)], n_features_in_=3, feature_names_in_=["color", "price", "size"]
    )
    assert [spec.dtype is DType.BYTES for spec in column_inputs(estimator, "m", DType.FP64)] == text


def test_documents_are_one_text_each() -> None:
    estimator = make_pipeline(CountVectorizer(), Ridge()).fit(["red car", "blue car"], [1, 2])
    (spec,) = column_inputs(estimator, "m", DType.FP32)
    assert (spec.name, spec.dtype, spec.shape) == ("text", DType.BYTES, (1,))
    assert {"red", "car", "blue"} <= set(spec.words)
    assert table_of(estimator, (spec,), {"text": np.array([["red"]], np.object_)}).tolist() == ["red"]
