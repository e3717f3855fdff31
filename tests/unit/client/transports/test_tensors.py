"""Raw representations of tensors, compared with tritonclient."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient import utils as triton

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.transports.tensors import datatype_of, from_raw, from_values, parse_datatype, to_raw

NUMBERS = [each for each in DType if each is not DType.BYTES]


@given(raw=st.binary(max_size=40), shape=st.lists(st.integers(-2, 5), max_size=3), name=st.sampled_from(list(DType)))
def test_garbage(raw: bytes, shape: list[int], name: DType) -> None:
    with contextlib.suppress(ProtocolError):
        assert from_raw(raw, name.value, tuple(shape)).ndim == len(shape)


class TestNames:
    @pytest.mark.parametrize("dtype", NUMBERS)
    def test_datatype_names_equal_tritonclient(self, dtype: DType) -> None:
        array = np.zeros(1, dtype.numpy)
        if dtype is not DType.BF16:  # which tritonclient calls by no numpy type
            assert datatype_of("X", array) == triton.np_to_triton_dtype(dtype.numpy)
        assert parse_datatype(dtype.value) is dtype

    @pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "longdouble", ">f4", "V4"])
    def test_unsupported_dtypes(self, dtype: str) -> None:
        with pytest.raises(InvalidInput, match="input 'X' cannot be sent"):
            datatype_of("X", np.zeros(1, dtype))


class TestToRaw:
    def test_bf16_is_the_upper_half_of_fp32(self) -> None:
        values = [1.0, -2.5, 2.0**100]  # each has a few bits only
        raw = bytes(to_raw(np.array(values, ml_dtypes.bfloat16)))
        assert raw == b"".join(struct.pack("<f", value)[2:] for value in values)

    def test_large_array_is_not_copied(self) -> None:
        array = np.zeros(100_000, np.float32)
        view = to_raw(array)
        array[0] = 1.0
        assert bytes(view[:4]) == struct.pack("<f", 1.0)

    @pytest.mark.parametrize("size", [4, 400])
    def test_raw_is_c_order(self, size: int) -> None:
        array = np.arange(size * size, dtype=np.int32).reshape(size, size)
        assert bytes(to_raw(array.T)) == array.T.tobytes(order="C")
        assert bytes(to_raw(array[::2, ::-1])) == array[::2, ::-1].tobytes(order="C")


class TestFromRaw:
    @pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
    def test_empty_tensor(self, shape: tuple[int, ...]) -> None:
        assert from_raw(b"", "FP32", shape).shape == shape
        assert from_raw(b"", "BYTES", shape).shape == shape

    @pytest.mark.parametrize(
        ("raw", "datatype", "shape"),
        [
            (b"\0" * 7, "FP32", (2,)),
            (b"", "FP32", ()),
            (b"\0" * 4, "FP32", (2**62, 2**62)),
            (b"\5\0\0\0abc", "BYTES", (1,)),
            (b"\xff\xff\xff\xffa", "BYTES", (1,)),
        ],
    )
    def test_bytes_of_wrong_size(self, raw: bytes, datatype: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(ProtocolError, match=f"{len(raw)} bytes are not a {datatype} tensor"):
            from_raw(raw, datatype, shape)


class TestFromValues:
    @pytest.mark.parametrize(
        ("values", "datatype", "expected"),
        [
            ([1, 2], "INT8", [1, 2]),
            ([[1], [2]], "UINT64", [1, 2]),
            ([2**64 - 1, 0], "UINT64", [2**64 - 1, 0]),
            ([-(2**63), 2**63 - 1], "INT64", [-(2**63), 2**63 - 1]),
            ([1.0, 2.0], "INT32", [1, 2]),
            ([True, False], "BOOL", [True, False]),
            ([1, 2.5], "FP64", [1, 2.5]),
            (["a", b"b"], "BYTES", [b"a", b"b"]),
            ([1, None], "BYTES", [b"1", b"None"]),
        ],
    )
    def test_flat_and_nested_values(self, values: Any, datatype: str, expected: list[Any]) -> None:
        array = from_values(values, datatype, (2, 1))
        assert array.ravel().tolist() == expected
        assert (array.shape, array.dtype) == ((2, 1), DType(datatype).numpy)

    @pytest.mark.parametrize(
        ("values", "datatype"),
        [
            ([256], "UINT8"),
            ([-1], "UINT64"),
            ([2**63], "INT64"),
            ([10**30], "INT64"),
            ([1.5], "INT32"),
            ([float("nan")], "INT32"),
            (["5"], "INT32"),
            ([[1], [2, 3]], "FP32"),
            ([1, 2], "FP32"),
        ],
    )
    def test_invalid_values(self, values: Any, datatype: str) -> None:
        with pytest.raises(ProtocolError, match=f"not a {datatype} tensor of shape"):
            from_values(values, datatype, (1,))
