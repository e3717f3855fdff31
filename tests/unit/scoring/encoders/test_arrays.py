"""Numbers and texts keep their values on the way from numpy to Arrow."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.scoring.encoders import arrow_type, elements, lists


@pytest.mark.parametrize("dtype", [each for each in DType if each not in (DType.BYTES, DType.BF16)])
def test_numbers_keep_their_type(dtype: DType) -> None:
    values = np.asarray([[0, 1], [1, 0]]).astype(dtype.numpy)
    array = elements(values)
    assert array.type == arrow_type(dtype)
    assert array.to_pylist() == values.reshape(-1).tolist()


def test_bf16_becomes_fp32_of_the_same_value() -> None:
    values = np.asarray([1.0, 0.1, -3.5], ml_dtypes.bfloat16)
    array = elements(values)
    assert array.type == pa.float32()
    assert array.to_pylist() == [float(value) for value in values]


def test_texts_are_strings() -> None:
    assert elements(np.asarray([["a", b"\xc3\xa9"]], object)).to_pylist() == ["a", "é"]


def test_a_text_that_is_not_utf8_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="not UTF-8"):
        elements(np.asarray([b"\xff"], object))


def test_a_view_that_is_not_contiguous_is_read_in_order() -> None:
    assert elements(np.arange(6, dtype=np.int32).reshape(2, 3).T).to_pylist() == [0, 3, 1, 4, 2, 5]


def test_lists_are_rows() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert lists(values).to_pylist() == values.tolist()
    assert lists(values.reshape(2, 3, 1)).to_pylist() == values.tolist()
