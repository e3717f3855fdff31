"""Bodies of HTTP messages, beside those of tritonclient."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.http as triton_http
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.transports import http_codec
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
def test_the_bytes_are_those_of_tritonclient(array: np.ndarray) -> None:
    request = InferRequest(
        model="m", version="", inputs={"X": array}, outputs={"Y": RequestedOutput(class_count=3)}, request_id="7"
    )
    parts, header_length = http_codec.encode_request(request, None)
    body = b"".join(parts)
    datatype = DType.from_numpy(array.dtype).value
    tensor = triton_http.InferInput("X", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    output = triton_http.InferRequestedOutput("Y", binary_data=True, class_count=3)
    theirs, their_length = triton_http.InferenceServerClient.generate_request_body(
        [tensor], outputs=[output], request_id="7"
    )
    assert json.loads(body[:header_length]) == json.loads(theirs[: their_length or len(theirs)])
    assert body[header_length:] == theirs[their_length or len(theirs) :]


@given(body=st.binary(max_size=80), length=st.none() | st.integers(0, 100))
def test_a_garbage_response_is_a_protocol_error(body: bytes, length: int | None) -> None:
    with pytest.raises(ProtocolError):
        http_codec.decode_response(body, length, InferRequest(model="m", version="", inputs={}))
