"""Element types, and their equivalents in numpy, Triton and the runtimes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError


@pytest.mark.parametrize("dtype", list(DType))
def test_numpy_round_trip(dtype: DType) -> None:
    assert DType.from_numpy(dtype.numpy) is dtype


def test_onnxruntime_sequences_are_refused() -> None:
    with pytest.raises(ManifestError, match="seq"):
        DType.from_onnxruntime("seq(map(int64,tensor(float)))")


_CARRIED = {
    *("FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING", "BOOL"),
    *("FLOAT16", "DOUBLE", "UINT32", "UINT64", "BFLOAT16"),
}
NUMERIC = [dtype for dtype in DType if dtype is not DType.BYTES]


@pytest.mark.parametrize("dtype", list(DType))
def test_names_equal_tritonclient(dtype: DType) -> None:
    assert np_to_triton_dtype(dtype.numpy) == dtype
    assert np.dtype(triton_to_np_dtype(dtype)) == dtype.numpy


@pytest.mark.parametrize("dtype", list(DType))
def test_config_names_and_numbers_equal_triton(dtype: DType) -> None:
    number = model_config_pb2.DataType.Value(dtype.config_name)
    assert DType.from_config(number) is dtype


def test_all_config_types_are_known() -> None:
    numbers = set(model_config_pb2.DataType.values())
    assert {DType.from_config(number) for number in numbers - {0}} == set(DType)
    for unknown in (0, 99):
        with pytest.raises(ManifestError, match=f"data type {unknown} of a config.pbtxt"):
            DType.from_config(unknown)


@pytest.mark.parametrize("dtype", NUMERIC)
def test_onnx_numbers(dtype: DType) -> None:
    assert DType.from_onnx(onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy)) is dtype


@pytest.mark.parametrize("name", sorted(set(onnx.TensorProto.DataType.keys()) - _CARRIED))
def test_unsupported_onnx_types(name: str) -> None:
    number = onnx.TensorProto.DataType.Value(name)
    with pytest.raises(ManifestError, match=f"the ONNX element type {name} is not one that Triton can carry"):
        DType.from_onnx(number)


@pytest.mark.parametrize("dtype", list(DType))
def test_onnxruntime_names(dtype: DType) -> None:
    text = dtype is DType.BYTES
    element = onnx.TensorProto.STRING if text else onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy)
    values = [onnx.helper.make_tensor_value_info(name, element, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert DType.from_onnxruntime(session.get_inputs()[0].type) is dtype


@pytest.mark.parametrize("dtype", NUMERIC)
def test_openvino_names(dtype: DType) -> None:
    element = openvino.Type.bf16 if dtype is DType.BF16 else openvino.Type(dtype.numpy)
    assert DType.from_openvino(element.get_type_name()) is dtype


@pytest.mark.parametrize("name", ["u4", "nf4", "string", "dynamic", "FP32", ""])
def test_unsupported_openvino_types(name: str) -> None:
    with pytest.raises(ManifestError, match=f"OpenVINO's element type {name} is not"):
        DType.from_openvino(name)


@pytest.mark.parametrize("dtype", ["S3", "U5", "O"])
def test_text_is_bytes(dtype: str) -> None:
    assert DType.from_numpy(np.dtype(dtype)) is DType.BYTES


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_other_byte_order_is_refused(dtype: str) -> None:
    """On the wire tensors are little-endian: an array of the other order must not pass for one."""
    with pytest.raises(ManifestError, match="has no tensor type"):
        DType.from_numpy(np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]", "V2", "longdouble", ml_dtypes.float8_e4m3fn])
def test_unsupported_numpy_types(dtype: str) -> None:
    with pytest.raises(ManifestError, match=r"has no tensor type \(use one of BOOL, .*BYTES\)"):
        DType.from_numpy(np.dtype(dtype))


def test_floats() -> None:
    for dtype in NUMERIC:
        floating = dtype is DType.BF16 or np.issubdtype(dtype.numpy, np.floating)
        assert dtype.is_float == floating
    assert not DType.BYTES.is_float


@pytest.mark.parametrize("dtype", DType)
def test_sizes_equal_numpy(dtype: DType) -> None:
    assert dtype.bytes == (0 if dtype is DType.BYTES else dtype.numpy.itemsize)
