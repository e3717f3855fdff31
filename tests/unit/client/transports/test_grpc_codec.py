"""Messages of gRPC, beside those of tritonclient."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from google.protobuf.internal import encoder
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from graphkiln_backend.graph.dtypes import DType
from graphkiln_client.transports import grpc_codec
from graphkiln_client.transports.base import InferRequest, RequestedOutput

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
def test_the_grpc_message_is_that_of_tritonclient(array: np.ndarray) -> None:
    request = InferRequest(
        model="m", version="2", inputs={"X": array}, outputs={"Y": RequestedOutput(class_count=3)}, request_id="7"
    )
    datatype = DType.from_numpy(array.dtype).value
    tensor = triton_grpc.InferInput("X", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    theirs = service_pb2.ModelInferRequest(model_name="m", model_version="2", id="7")
    theirs.inputs.add(name="X", datatype=datatype, shape=array.shape)
    theirs.raw_input_contents.append(tensor._get_content() or b"")
    theirs.outputs.add(name="Y").parameters["classification"].int64_param = 3
    assert service_pb2.ModelInferRequest.FromString(grpc_codec.encode_request(request, None)) == theirs


@given(number=st.integers(0, 2**40))
def test_a_length_is_written_as_protocol_buffers_do(number: int) -> None:
    assert grpc_codec._varint(number) == encoder._VarintBytes(number)
