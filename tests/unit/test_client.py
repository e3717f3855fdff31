"""Images, results and the wire format, without a server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.internal import encoder
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    InvalidInput,
    ProtocolError,
)
from graphkiln_client import Client
from graphkiln_client.results import Classification, Result
from graphkiln_client.transports import grpc_wire, http_body
from graphkiln_client.transports.base import InferRequest, Wanted, from_bytes, raw_buffer


class TestResults:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0.5:3:cat", Classification(index=3, label="cat", score=0.5)),
            ("3.630257:499", Classification(index=499, label="", score=3.630257)),
            ("-1e-05:0:a:b", Classification(index=0, label="a:b", score=-1e-5)),
        ],
    )
    def test_parses_tritons_form(self, text: str, expected: Classification) -> None:
        assert Classification.parse(text) == expected

    @given(st.text(max_size=30))
    def test_never_fails_but_by_a_protocol_error(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            Classification.parse(text)

    def test_json_has_no_nan(self) -> None:
        answer = Classification(index=0, label="", score=float("nan"))
        result = Result(source="s", model="m", version="1", request_id="", latency_ms=1.0, outputs={"y": (answer,)})
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["classifications"][0]["score"] is None


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([[True, False]]),
    np.array([b"a", b"", b"\xff\x00"], np.object_),
    np.array([["x", "\u00e4"]], np.object_),
    np.zeros((0, 3), np.int64),
    np.array(7, np.uint8).reshape(()),
    np.arange(4, dtype=np.float16)[::2],
]


class TestWireFormat:
    @pytest.mark.parametrize("array", ARRAYS)
    def test_the_bytes_are_those_of_tritonclient(self, array: np.ndarray) -> None:
        request = InferRequest(
            model="m", version="", inputs={"X": array}, outputs={"Y": Wanted(classes=3)}, request_id="7"
        )
        parts, header_length = http_body.encode_request(request, None)
        body = b"".join(parts)
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_http.InferInput("X", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        wanted = triton_http.InferRequestedOutput("Y", binary_data=True, class_count=3)
        theirs, their_length = triton_http.InferenceServerClient.generate_request_body(
            [tensor], outputs=[wanted], request_id="7"
        )
        assert json.loads(body[:header_length]) == json.loads(theirs[: their_length or len(theirs)])
        assert body[header_length:] == theirs[their_length or len(theirs) :]

    @pytest.mark.parametrize("array", ARRAYS)
    def test_the_grpc_message_is_that_of_tritonclient(self, array: np.ndarray) -> None:
        request = InferRequest(
            model="m", version="2", inputs={"X": array}, outputs={"Y": Wanted(classes=3)}, request_id="7"
        )
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_grpc.InferInput("X", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        theirs = service_pb2.ModelInferRequest(model_name="m", model_version="2", id="7")
        theirs.inputs.add(name="X", datatype=datatype, shape=array.shape)
        theirs.raw_input_contents.append(tensor._get_content() or b"")
        theirs.outputs.add(name="Y").parameters["classification"].int64_param = 3
        assert service_pb2.ModelInferRequest.FromString(grpc_wire.encode_request(request, None)) == theirs

    @given(number=st.integers(0, 2**40))
    def test_a_length_is_written_as_protocol_buffers_do(self, number: int) -> None:
        assert grpc_wire._varint(number) == encoder._VarintBytes(number)

    @pytest.mark.parametrize("array", ARRAYS)
    def test_there_and_back(self, array: np.ndarray) -> None:
        back = from_bytes(bytes(raw_buffer(array)), DType.from_numpy(array.dtype).value, array.shape)
        expected = np.array([w.encode() if isinstance(w, str) else w for w in array.ravel()], array.dtype)
        np.testing.assert_array_equal(back.ravel(), expected)
        assert back.shape == array.shape

    @given(
        raw=st.binary(max_size=40), shape=st.lists(st.integers(-2, 5), max_size=3), name=st.sampled_from(list(DType))
    )
    def test_garbage_is_a_protocol_error(self, raw: bytes, shape: list[int], name: DType) -> None:
        with contextlib.suppress(ProtocolError):
            assert from_bytes(raw, name.value, tuple(shape)).ndim == len(shape)

    @given(body=st.binary(max_size=80), length=st.none() | st.integers(0, 100))
    def test_a_garbage_response_is_a_protocol_error(self, body: bytes, length: int | None) -> None:
        with pytest.raises(ProtocolError):
            http_body.decode_response(body, length, InferRequest(model="m", version="", inputs={}))


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="use http://HOST:PORT, https://HOST:PORT"):
        Client("ftp://somewhere")


def test_the_command_line_imports_nothing_heavy() -> None:
    program = "import sys; import graphkiln.cli.main; print(' '.join(sys.modules))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    heavy = {"numpy", "onnxruntime", "torch", "tritonclient", "aiohttp", "grpc", "PIL", "rich"}
    assert not heavy & set(shown.stdout.split())
