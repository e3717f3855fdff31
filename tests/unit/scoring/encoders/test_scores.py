"""All scores of a row in the order of the classes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph import task as topk
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.scoring.encoders import AllScores

SCORES = np.asarray([[1, 2, 3], [0, -1, 5]], np.float32)


def test_a_list_per_row() -> None:
    encoder = AllScores("y", DType.FP32, 3)
    (column,) = encoder.encode({"y": SCORES})
    assert encoder.schema.field("scores").type == column.type == pa.list_(pa.float32())
    assert column.to_pylist() == SCORES.tolist()


def test_probabilities_are_the_clients() -> None:
    encoder = AllScores("y", DType.FP32, 3, softmax=True)
    (column,) = encoder.encode({"y": SCORES})
    assert column.type == pa.list_(pa.float64())
    assert column.to_pylist() == topk.softmax(SCORES).tolist()


def test_16_bit_scores_are_written_as_fp32() -> None:
    (column,) = AllScores("y", DType.FP16, 3).encode({"y": SCORES.astype(np.float16)})
    assert column.type == pa.list_(pa.float32())


def test_another_number_of_classes_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="has 3 scores, expected 4"):
        AllScores("y", DType.FP32, 4).encode({"y": SCORES})
