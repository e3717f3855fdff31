"""HTTP requests and responses, without a connection; beside those of tritonclient."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton_http
from canned import CannedHttp, http
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_arrays import ARRAYS

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ClientError,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_backend.graph.text import bounded
from graphkiln_client.transports.base import Call, InferRequest, InferResponse, RequestedOutput, SharedTensor
from graphkiln_client.transports.http_wire import (
    HttpRequest,
    HttpResponse,
    HttpWire,
    decode_response,
    encode_request,
    http_error,
    parse_json,
)

WIRE = HttpWire()


def response(body: bytes = b"{}", status: int = 200, **headers: str) -> HttpResponse:
    return HttpResponse(status=status, headers=headers, body=body)


def read(call: Call[Any], body: bytes = b"{}", status: int = 200, **headers: str) -> Any:
    return call.read(response(body, status, **headers))


class TestRequests:
    """What tritonclient sends for the same call is the reference."""

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (WIRE.live(), lambda client: client.is_server_live()),
            (WIRE.ready(), lambda client: client.is_server_ready()),
            (WIRE.model_metadata("m", ""), lambda client: client.get_model_metadata("m")),
            (WIRE.model_metadata("m", "2"), lambda client: client.get_model_metadata("m", "2")),
            (WIRE.model_config("m", "2"), lambda client: client.get_model_config("m", "2")),
            (WIRE.model_statistics("m", "2"), lambda client: client.get_inference_statistics("m", "2")),
            (WIRE.model_statistics("", ""), lambda client: client.get_inference_statistics()),
            (WIRE.repository_index(), lambda client: client.get_model_repository_index()),
            (WIRE.load("m"), lambda client: client.load_model("m")),
            (WIRE.load("m", '{"a": 1}'), lambda client: client.load_model("m", config='{"a": 1}')),
            (WIRE.unload("m"), lambda client: client.unload_model("m")),
            (
                WIRE.register_region("r", "/r", 64),
                lambda client: client.register_system_shared_memory("r", "/r", 64),
            ),
            (WIRE.region_status("r"), lambda client: client.get_system_shared_memory_status("r")),
            (WIRE.unregister_region("r"), lambda client: client.unregister_system_shared_memory("r")),
        ],
    )
    def test_are_those_of_tritonclient(self, ours: Call[Any], theirs: Callable[[Any], Any]) -> None:
        with CannedHttp([http(b"{}")]) as server:
            client = triton_http.InferenceServerClient(server.url.removeprefix("http://"))
            theirs(client)
            client.close()
            head, _, body = server.requests[0].partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        request: HttpRequest = ours.request
        assert (request.method, request.path) == (method, path)
        if "register" in path:
            assert json.loads(b"".join(request.body)) == json.loads(body or b"{}")

    @pytest.mark.parametrize("name", ["a/b", "a?b", "a#b", "\u00e4", "a b", "a%2Fb", "a\r\nb"])
    def test_a_name_is_one_part_of_the_path(self, name: str) -> None:
        for call in (WIRE.model_metadata(name, name), WIRE.load(name), WIRE.region_status(name)):
            path = call.request.path
            assert path.count("/") == 5
            assert not set(path) & set("?# \r\n")
            assert path.isascii()

    def test_an_inference_with_bytes(self) -> None:
        request = InferRequest(model="m", version="2", inputs={"X": np.arange(3, dtype=np.uint8)})
        sent: HttpRequest = WIRE.infer(request, 1.5, binary=True).request
        assert (sent.method, sent.path) == ("POST", "/v2/models/m/versions/2/infer")
        length = int(sent.headers["Inference-Header-Content-Length"])
        body = b"".join(sent.body)
        assert json.loads(body[:length])["parameters"]["timeout"] == 1_500_000
        assert body[length:] == b"\0\1\2"

    def test_an_inference_with_json(self) -> None:
        request = InferRequest(model="m", version="", inputs={"X": np.arange(3, dtype=np.uint8)})
        sent: HttpRequest = WIRE.infer(request, 1.5, binary=False).request
        assert sent.headers == {"Content-Type": "application/json"}
        assert json.loads(b"".join(sent.body))["inputs"][0]["data"] == [0, 1, 2]

    @pytest.mark.parametrize(("compression", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
    def test_a_compressed_inference_is_the_same_inside(self, compression: Any, unpack: Any) -> None:
        request = InferRequest(model="m", version="", inputs={"X": np.zeros(1000, np.float32)})
        plain: HttpRequest = WIRE.infer(request, 1.5, binary=True).request
        packed: HttpRequest = HttpWire(compression).infer(request, 1.5, binary=True).request
        assert unpack(b"".join(packed.body)) == b"".join(plain.body)
        assert len(b"".join(packed.body)) < 1000
        assert packed.headers["Content-Encoding"] == packed.headers["Accept-Encoding"] == compression
        name = "Inference-Header-Content-Length"
        assert packed.headers[name] == plain.headers[name], "of the body before it is compressed"


class TestReady:
    @pytest.mark.parametrize(("status", "expected"), [(200, True), (400, False), (503, False), (500, False)])
    def test_yes_and_no(self, status: int, expected: bool) -> None:
        assert read(WIRE.ready(), b"", status) is expected
        assert read(WIRE.live(), b"", status) is expected

    @pytest.mark.parametrize(
        ("status", "kind"), [(401, Unauthorized), (403, Unauthorized), (404, ModelNotFound), (429, Overloaded)]
    )
    def test_a_refusal_is_no_answer(self, status: int, kind: type[ClientError]) -> None:
        with pytest.raises(kind):
            read(WIRE.ready(), b"", status)


class TestDocuments:
    @pytest.mark.parametrize(
        "call",
        [
            WIRE.server_metadata(),
            WIRE.model_metadata("m", ""),
            WIRE.model_config("m", ""),
            WIRE.model_statistics("m", ""),
        ],
    )
    def test_an_object_is_expected(self, call: Call[Any]) -> None:
        assert read(call, b'{"a": 1}') == {"a": 1}
        for body in (b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000):
            with pytest.raises(ProtocolError):
                read(call, body)
        with pytest.raises(ServerError):
            read(call, b"{}", 500)

    def test_the_index_is_a_list_of_objects(self) -> None:
        assert read(WIRE.repository_index(), b'[{"name": "m"}]') == [{"name": "m"}]
        assert read(WIRE.repository_index(), b"[]") == []
        for body in (b"{}", b"[1]", b'["m"]', b"null"):
            with pytest.raises(ProtocolError, match="index is not a list of models"):
                read(WIRE.repository_index(), body)

    @pytest.mark.parametrize(
        "call",
        [WIRE.load("m"), WIRE.unload("m"), WIRE.register_region("r", "/r", 1), WIRE.region_status("r")],
    )
    def test_some_calls_return_nothing_but_success(self, call: Call[Any]) -> None:
        assert read(call, b"whatever") is None
        with pytest.raises(InvalidInput, match="because"):
            read(call, b'{"error": "because"}', 400)


class TestInferResponse:
    CALL = WIRE.infer(InferRequest(model="m", version="", inputs={}, request_id="7"), 1.0, binary=True)

    @pytest.mark.parametrize("length", ["", "x", "-1", "1.5", "\u0663", "9" * 19, "9" * 5000])
    def test_a_length_that_is_none_means_no_bytes(self, length: str) -> None:
        headers = {"Inference-Header-Content-Length": length}
        body = b'{"model_name": "m", "outputs": []}'
        with contextlib.suppress(ProtocolError):  # Arabic digits are a number, too, and too small here
            assert self.CALL.read(HttpResponse(status=200, headers=headers, body=body)).model == "m"

    def test_an_error_carries_the_id_of_the_request(self) -> None:
        with pytest.raises(ServerError) as caught:
            read(self.CALL, b"{}", 500)
        assert caught.value.request_id == "7"


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "no reason given"),
            (b"<html>Bad Gateway", "<html>Bad Gateway"),
            (b'{"message": "x"}', '{"message": "x"}'),
            (b"[1]", "[1]"),
            (b'{"error": 7}', "7"),
            (b"\xff", "\ufffd"),
            (b"[" * 5000, bounded("[" * 5000)),
            (json.dumps({"error": "ä" * 1000}).encode(), "ä" * 1000),
            (b'{"error": "cut short\\n\\nAt:\\n  /x/model.py(97): _load\\n"}', "cut short"),
        ],
    )
    def test_the_reason_is_the_servers_own_words(self, body: bytes, reason: str) -> None:
        assert http_error(response(body, 500), None).message == f"the server returned 500: {reason}"

    @pytest.mark.parametrize(
        ("page", "reason"),
        [
            (b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<body><hr>nginx</body>", "404 Not Found"),
            (b"\n<!DOCTYPE HTML>\n<html lang=en><head><title>\n Error response\n</title>", "Error response"),
            (b"<!doctype html><h1>no title", "<!doctype html><h1>no title"),
        ],
    )
    def test_a_page_is_not_tritons_and_told_by_its_title(self, page: bytes, reason: str) -> None:
        error = http_error(response(page, 404), None)
        assert error.message == f"the server returned 404: {reason}"
        assert "another server, or a gateway" in error.hint
        assert "models" not in error.hint
        assert error.body == page.decode()

    @pytest.mark.parametrize(
        ("header", "seconds"),
        [("7", 7.0), ("0", 0.0), ("", None), ("-1", None), ("1.5", None), ("Fri, 31 Dec 1999 23:59:59 GMT", None)],
    )
    def test_when_to_try_again(self, header: str, seconds: float | None) -> None:
        error = http_error(HttpResponse(status=429, headers={"Retry-After": header}, body=b""), None)
        assert error.retry_after_s == seconds


@settings(max_examples=300, deadline=None)
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "outputs",
                        "name",
                        "shape",
                        "datatype",
                        "parameters",
                        "binary_data_size",
                        "data",
                        "id",
                        "model_name",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=15,
    ),
    tail=st.binary(max_size=20),
)
def test_whatever_the_response_the_error_is_ours(document: Any, tail: bytes) -> None:
    head = json.dumps(document).encode()
    call = HttpWire().infer(InferRequest(model="m", version="", inputs={}, request_id="1"), 1.0, binary=True)
    received = HttpResponse(status=200, headers={"Inference-Header-Content-Length": str(len(head))}, body=head + tail)
    with contextlib.suppress(ProtocolError):
        call.read(received)


# Bodies of HTTP messages, beside those of tritonclient.


@pytest.mark.parametrize("array", ARRAYS)
def test_the_bytes_are_those_of_tritonclient(array: np.ndarray) -> None:
    request = InferRequest(
        model="m", version="", inputs={"X": array}, outputs={"Y": RequestedOutput(class_count=3)}, request_id="7"
    )
    parts, header_length = encode_request(request, None)
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
    parts, length = encode_request(request, timeout_s, binary=binary)
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
    return decode_response(*message, asked or request())


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
        parse_json(b"<html>")
