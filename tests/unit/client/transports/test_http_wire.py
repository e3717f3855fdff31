"""HTTP requests and responses, without a connection; beside those of tritonclient."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
from canned import CannedHttp, http
from hypothesis import given, settings
from hypothesis import strategies as st

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
from graphkiln_client.transports.base import Call, InferRequest
from graphkiln_client.transports.http_wire import HttpRequest, HttpResponse, HttpWire, http_error

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
