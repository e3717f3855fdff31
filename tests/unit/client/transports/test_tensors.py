"""The raw representation of tensors."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.transports.tensors import from_raw, to_raw

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([[True, False]]),
    np.array([b"a", b"", b"\xff\x00"], np.object_),
    np.array([["x", "\u00e4"]], np.object_),
    np.zeros((0, 3), np.int64),
    np.array(7, np.uint8).reshape(()),
    np.arange(4, dtype=np.float16)[::2],
]


@pytest.mark.parametrize("array", ARRAYS)
def test_there_and_back(array: np.ndarray) -> None:
    back = from_raw(bytes(to_raw(array)), DType.from_numpy(array.dtype).value, array.shape)
    expected = np.array([w.encode() if isinstance(w, str) else w for w in array.ravel()], array.dtype)
    np.testing.assert_array_equal(back.ravel(), expected)
    assert back.shape == array.shape


@given(raw=st.binary(max_size=40), shape=st.lists(st.integers(-2, 5), max_size=3), name=st.sampled_from(list(DType)))
def test_garbage_is_a_protocol_error(raw: bytes, shape: list[int], name: DType) -> None:
    with contextlib.suppress(ProtocolError):
        assert from_raw(raw, name.value, tuple(shape)).ndim == len(shape)
