"""From numpy's arrays to Arrow's, without a copy where both keep numbers alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError

# Arrow has no bf16; fp32 holds each of its numbers.
_TYPES: Mapping[DType, pa.DataType] = {
    DType.BOOL: pa.bool_(),
    DType.UINT8: pa.uint8(),
    DType.UINT16: pa.uint16(),
    DType.UINT32: pa.uint32(),
    DType.UINT64: pa.uint64(),
    DType.INT8: pa.int8(),
    DType.INT16: pa.int16(),
    DType.INT32: pa.int32(),
    DType.INT64: pa.int64(),
    DType.FP16: pa.float16(),
    DType.BF16: pa.float32(),
    DType.FP32: pa.float32(),
    DType.FP64: pa.float64(),
    DType.BYTES: pa.string(),
}


def arrow_type(dtype: DType) -> pa.DataType:
    """The type of a column of such elements."""
    return _TYPES[dtype]


def elements(values: AnyArray) -> pa.Array:
    """All elements of an array in one dimension, in row-major order.

    Raises:
        ExecutionError: A text is not UTF-8.
    """
    dtype = DType.from_numpy(values.dtype)
    flat = values.reshape(-1)
    if dtype is DType.BYTES:
        return _texts(flat)
    return pa.array(flat.astype(np.float32) if dtype is DType.BF16 else np.ascontiguousarray(flat), _TYPES[dtype])


def lists(values: AnyArray) -> pa.ListArray:
    """`[rows, ...]` as one list per row, in row-major order.

    Never lists of a fixed size, whatever the length: Arrow writes those to Parquet where one is null, as of a row with
    an error, and then cannot read the file.
    """
    rows, length = len(values), math.prod(values.shape[1:])
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), elements(values))


def _texts(flat: AnyArray) -> pa.Array:
    try:
        return pa.array([one.decode() if isinstance(one, bytes) else str(one) for one in flat.tolist()], pa.string())
    except UnicodeError as error:
        raise ExecutionError(f"the model returns a text that is not UTF-8: {error}") from error
