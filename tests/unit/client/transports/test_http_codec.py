"""Bodies of HTTP messages, beside those of tritonclient."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton_http

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.transports import http_wire as http_codec
from graphkiln_client.transports.base import InferRequest, InferResponse, RequestedOutput, SharedTensor

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


def request(**inputs: Any) -> InferRequest:
    return InferRequest(model="m", version="", inputs=inputs)


def encode(request: InferRequest, timeout_s: float | None = None, *, binary: bool = True) -> tuple[Any, bytes]:
    """The JSON header, and the bytes behind it."""
    parts, length = http_codec.encode_request(request, timeout_s, binary=binary)
    body = b"".join(parts)
    return json.loads(body[:length]), body[length:]


PLACE = SharedTensor(region="r", offset=64, size_bytes=12, datatype=DType.FP32, shape=(1, 3))


class TestEncodeRequest:
    def test_bytes_follow_in_the_order_of_the_inputs(self) -> None:
        header, raw = encode(request(A=np.array([1], np.uint8), T=np.array([b"ab"], object), B=np.array([2], np.int16)))
        assert [row["name"] for row in header["inputs"]] == ["A", "T", "B"]
        assert [row["parameters"]["binary_data_size"] for row in header["inputs"]] == [1, 6, 2]
        assert raw == b"\1" + b"\2\0\0\0ab" + b"\2\0"

    def test_all_outputs_as_bytes_where_none_is_named(self) -> None:
        header, _ = encode(request(X=np.zeros(1)))
        assert header["parameters"] == {"binary_data_output": True}
        assert "outputs" not in header

    def test_the_contract_that_it_is_made_for(self) -> None:
        asked = InferRequest(model="m", version="", inputs={}, contract="abc")
        assert encode(asked)[0]["parameters"]["contract"] == "abc"

    def test_tensors_in_shared_memory_are_no_bytes(self) -> None:
        outputs = {"Y": RequestedOutput(shared=PLACE)}
        header, raw = encode(InferRequest(model="m", version="", inputs={"X": PLACE}, outputs=outputs))
        tensor = triton_http.InferInput("X", [1, 3], "FP32")
        tensor.set_shared_memory("r", 12, 64)
        output = triton_http.InferRequestedOutput("Y")
        output.set_shared_memory("r", 12, 64)
        theirs = json.loads(triton_http.InferenceServerClient.generate_request_body([tensor], outputs=[output])[0])
        assert theirs["outputs"][0]["parameters"].pop("binary_data") is False, "which is what is said by nothing"
        assert header == theirs
        assert raw == b""


class TestEncodeJson:
    def test_tensors_are_lists_of_their_elements(self) -> None:
        header, raw = encode(
            request(
                X=np.array([[1.5, 2]], np.float32),
                N=np.array([2**62], np.int64),
                B=np.array([True]),
                T=np.array(["a", "\u00e4".encode()], object),
            ),
            binary=False,
        )
        assert [row["data"] for row in header["inputs"]] == [[1.5, 2.0], [2**62], [True], ["a", "\u00e4"]]
        assert header["inputs"][0]["shape"] == [1, 2]
        assert raw == b""
        assert "parameters" not in header

    def test_named_outputs_are_json_as_well(self) -> None:
        asked = InferRequest(model="m", version="", inputs={}, outputs={"Y": RequestedOutput()})
        assert encode(asked, binary=False)[0]["outputs"] == [{"name": "Y"}]

    @pytest.mark.parametrize(
        ("array", "words"),
        [
            (np.zeros(1, np.float16), "is FP16"),
            (np.zeros(1, ml_dtypes.bfloat16), "is BF16"),
            (np.array([b"\xff"], object), "bytes that are no text"),
            (np.array([np.nan]), "NaN or infinity"),
            (np.array([1.0, np.inf], np.float32), "NaN or infinity"),
        ],
    )
    def test_what_json_cannot_carry(self, array: Any, words: str) -> None:
        with pytest.raises(InvalidInput, match=f"input 'X' .*{words}"):
            encode(request(X=array), binary=False)


def body(outputs: list[dict[str, Any]], raw: bytes = b"", **fields: Any) -> tuple[bytes, int]:
    head = json.dumps({"model_name": "m", "model_version": "3", "outputs": outputs, **fields}).encode()
    return head + raw, len(head)


def row(name: str, array: Any, datatype: str) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape)}


def decode(message: tuple[bytes, int | None], asked: InferRequest | None = None) -> InferResponse:
    return http_codec.decode_response(*message, asked or request())


class TestDecodeResponse:
    @pytest.mark.parametrize("array", ARRAYS)
    def test_bytes_are_read_as_tritonclient_reads_them(self, array: Any) -> None:
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_http.InferInput("Y", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        raw = tensor._get_binary_data() or b""
        first = {"name": "N", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}}
        second = {**row("Y", array, datatype), "parameters": {"binary_data_size": len(raw)}}
        whole, length = body([first, second], b"\7\x08" + raw)
        ours = decode((whole, length))
        theirs = triton_http.InferResult.from_response_body(whole, header_length=length)
        assert list(ours.outputs) == ["N", "Y"]
        np.testing.assert_array_equal(ours.outputs["N"], [7, 8])
        np.testing.assert_array_equal(ours.outputs["Y"], theirs.as_numpy("Y"))
        assert ours.outputs["Y"].shape == array.shape

    @pytest.mark.parametrize(
        ("datatype", "data", "expected"),
        [
            ("FP32", [[1.5, 2]], [[1.5, 2.0]]),
            ("INT64", [[2**62, -1]], [[2**62, -1]]),
            ("UINT64", [[2**64 - 1, 0]], [[2**64 - 1, 0]]),
            ("BOOL", [[True, False]], [[True, False]]),
            ("BYTES", [["a", "\u00e4"]], [[b"a", "\u00e4".encode()]]),
            ("FP32", [1.5, 2], [[1.5, 2.0]]),
        ],
    )
    def test_json_flat_or_nested(self, datatype: str, data: Any, expected: Any) -> None:
        whole, _ = body([{"name": "Y", "datatype": datatype, "shape": [1, 2], "data": data}])
        assert decode((whole, None)).outputs["Y"].tolist() == expected

    def test_an_output_in_shared_memory_has_a_shape_only(self) -> None:
        asked = InferRequest(model="m", version="", inputs={}, outputs={"Y": RequestedOutput(shared=PLACE)})
        output = {"name": "Y", "datatype": "FP32", "shape": [1, 3], "parameters": {"shared_memory_region": "r"}}
        response = decode(body([output]), asked)
        assert response.shared_shapes == {"Y": (1, 3)}
        assert response.outputs == {}

    def test_arrays_are_views_of_the_response(self) -> None:
        output = {"name": "Y", "datatype": "UINT8", "shape": [3], "parameters": {"binary_data_size": 3}}
        array = decode(body([output], b"abc")).outputs["Y"]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1

    @pytest.mark.parametrize("own", ["7", ""])
    def test_an_id_that_was_sent_must_come_back(self, own: str) -> None:
        asked = InferRequest(model="m", version="", inputs={}, request_id=own)
        assert decode(body([], id=own), asked).model == "m"
        assert decode(body([]), asked).model == "m", "it need not come back at all"
        if own:
            with pytest.raises(ProtocolError, match="request 7 has the id 8"):
                decode(body([], id="8"), asked)

    @pytest.mark.parametrize(
        ("output", "raw"),
        [
            ({}, b""),
            ({"name": "Y"}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": 1, "data": [1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": ["x"], "data": [1]}, b""),
            ({"name": "Y", "datatype": "FP33", "shape": [1], "data": [1]}, b""),
            ({"name": "Y", "datatype": ["FP32"], "shape": [1], "data": [1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [2], "data": [1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [-1], "data": [1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "data": ["one"]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "data": {"a": 1}}, b""),
            ({"name": "Y", "datatype": "UINT8", "shape": [1], "data": [256]}, b""),
            ({"name": "Y", "datatype": "UINT8", "shape": [1], "data": [-1]}, b""),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": {}}, b"\0\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}, b"\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": -4}}, b"\0\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": -4}}, b"\0\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 3}}, b"\0\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "x"}}, b"\0\0\0\0"),
            ({"name": "Y", "datatype": "FP32", "shape": [1], "parameters": None}, b"\0\0\0\0"),
        ],
    )
    def test_a_malformed_output(self, output: dict[str, Any], raw: bytes) -> None:
        with pytest.raises(ProtocolError):
            decode(body([output], raw))

    @pytest.mark.parametrize("whole", [b"", b"null", b"[]", b"{}", b'{"outputs": null, "model_name": "m"}', b"\xff{}"])
    def test_a_malformed_document(self, whole: bytes) -> None:
        with pytest.raises(ProtocolError):
            decode((whole, None))


def test_a_web_page_is_told_from_a_server() -> None:
    with pytest.raises(ProtocolError, match="HTTP port of a Triton server"):
        http_codec.parse_json(b"<html>")
