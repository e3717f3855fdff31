"""Encoding and parsing of both protocols, compared with tritonclient."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from canned import CannedGrpc, CannedHttp, http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from wire_arrays import ARRAYS

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_backend.graph.text import bounded
from graphkiln_client.transports import grpc_transport
from graphkiln_client.transports.base import PLAIN, InferRequest, InferResponse, RequestedOutput, SharedTensor, Wire
from graphkiln_client.transports.grpc_transport import GrpcWire, grpc_error, parse_response
from graphkiln_client.transports.http_wire import HttpResponse, HttpWire, http_error
from graphkiln_client.transports.tensors import to_raw

HTTP, GRPC = HttpWire(), GrpcWire()
LENGTH = "Inference-Header-Content-Length"
PLACE = SharedTensor(region="r", offset=64, size_bytes=12, datatype=DType.FP32, shape=(1, 3))

both = pytest.mark.parametrize("protocol", ["http", "grpc"])


def request(
    inputs: dict[str, Any] | None = None, outputs: dict[str, RequestedOutput] | None = None, **fields: Any
) -> InferRequest:
    return InferRequest(model="m", version="2", inputs=inputs or {}, outputs=outputs or {}, **fields)


def http_parts(asked: InferRequest, *, binary: bool = True) -> tuple[Any, bytes]:
    """Return the JSON header of a request, and the bytes after it."""
    sent = HTTP.infer(asked, 1.5, binary=binary).request
    body = b"".join(sent.body)
    length = int(sent.headers.get(LENGTH, len(body)))
    return json.loads(body[:length]), body[length:]


def grpc_message(asked: InferRequest) -> Any:
    return pb.ModelInferRequest.FromString(GRPC.infer(asked, 1.5, binary=True).request.message)


def read_http(
    outputs: Any, raw: bytes = b"", asked: InferRequest | None = None, *, length: str = "", **fields: Any
) -> InferResponse:
    head = json.dumps({"model_name": "m", "model_version": "3", "outputs": outputs, **fields}).encode()
    headers = {LENGTH: length or (str(len(head)) if raw else "")}
    response = HttpResponse(status=200, headers=headers, body=head + raw)
    return HTTP.infer(asked or request(), 1.0, binary=True).read(response)


def read_grpc(outputs: Any, raw: Any = (), asked: InferRequest | None = None, **fields: Any) -> InferResponse:
    message = pb.ModelInferResponse(
        model_name="m", model_version="3", outputs=outputs, raw_output_contents=raw, **fields
    )
    return GRPC.infer(asked or request(), 1.0, binary=True).read(message.SerializeToString())


def row(name: str, shape: Any = (1,), datatype: str = "UINT8", **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **fields}


class TestRequests:
    @both
    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (lambda wire: wire.ready(), lambda client: client.is_server_ready()),
            (lambda wire: wire.model_metadata("m", ""), lambda client: client.get_model_metadata("m")),
            (lambda wire: wire.model_metadata("m", "2"), lambda client: client.get_model_metadata("m", "2")),
            (lambda wire: wire.model_config("m", "2"), lambda client: client.get_model_config("m", "2")),
            (lambda wire: wire.model_statistics("m", "2"), lambda client: client.get_inference_statistics("m", "2")),
            (lambda wire: wire.model_statistics("", ""), lambda client: client.get_inference_statistics()),
            (lambda wire: wire.repository_index(), lambda client: client.get_model_repository_index()),
            (lambda wire: wire.load("m"), lambda client: client.load_model("m")),
            (lambda wire: wire.load("m", '{"a": 1}'), lambda client: client.load_model("m", config='{"a": 1}')),
            (lambda wire: wire.unload("m"), lambda client: client.unload_model("m")),
            (
                lambda wire: wire.register_region("r", "/r", 64),
                lambda client: client.register_system_shared_memory("r", "/r", 64),
            ),
            (lambda wire: wire.region_status("r"), lambda client: client.get_system_shared_memory_status("r")),
            (lambda wire: wire.unregister_region("r"), lambda client: client.unregister_system_shared_memory("r")),
        ],
    )
    def test_calls_equal_tritonclient(
        self, protocol: str, ours: Callable[[Wire], Any], theirs: Callable[[Any], Any]
    ) -> None:
        if protocol == "grpc":
            with CannedGrpc([b""]) as server:
                client = triton_grpc.InferenceServerClient(server.url.removeprefix("grpc://"))
                theirs(client)
                client.close()
            sent = ours(GRPC).request
            assert sent.method == f"/inference.GRPCInferenceService/{server.methods[0]}"
            if not sent.method.endswith("RepositoryModelUnload"):  # theirs says the default: unload_dependents
                assert sent.message == server.messages[0]
            return
        with CannedHttp([http(b"{}")]) as server:
            client = triton_http.InferenceServerClient(server.url.removeprefix("http://"))
            theirs(client)
            client.close()
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        sent = ours(HTTP).request
        assert [sent.method, sent.path] == head.split(b"\r\n")[0].decode().split(" ")[:2]
        if "register" in sent.path:
            assert json.loads(b"".join(sent.body)) == json.loads(body or b"{}")

    @pytest.mark.parametrize("name", ["a/b", "a?b", "\u00e4", "a\r\nb"])
    def test_names_are_quoted_in_paths(self, name: str) -> None:
        for call in (HTTP.model_metadata(name, name), HTTP.load(name), HTTP.region_status(name)):
            path = call.request.path
            assert path.count("/") == 5
            assert not set(path) & set("?# \r\n")
            assert path.isascii()

    @pytest.mark.parametrize("array", ARRAYS)
    def test_inference_equals_tritonclient(self, array: Any) -> None:
        asked = request({"N": np.arange(2, dtype=np.uint8), "X": array}, {"Y": RequestedOutput(class_count=3)})
        datatype = DType.from_numpy(array.dtype).value
        tensors = {}
        for library in (triton_http, triton_grpc):
            tensors[library] = [library.InferInput("N", [2], "UINT8"), library.InferInput("X", array.shape, datatype)]
            tensors[library][0].set_data_from_numpy(np.arange(2, dtype=np.uint8))
            tensors[library][1].set_data_from_numpy(array)
        output = triton_http.InferRequestedOutput("Y", binary_data=True, class_count=3)
        theirs, length = triton_http.InferenceServerClient.generate_request_body(
            tensors[triton_http], outputs=[output], timeout=1_500_000
        )
        header, raw = http_parts(asked)
        expected = json.loads(theirs[:length])
        assert header["inputs"] == [{**each, "shape": list(each["shape"])} for each in expected["inputs"]]
        assert (header["outputs"], header["parameters"]) == (
            expected["outputs"],
            {"timeout": 1_500_000, "pinned_version": "2"},
        )
        assert raw == theirs[length:]
        message = pb.ModelInferRequest(model_name="m", model_version="2")
        for tensor in tensors[triton_grpc]:
            message.inputs.append(tensor._get_tensor())
            message.raw_input_contents.append(tensor._get_content() or b"")
        message.outputs.add(name="Y").parameters["classification"].int64_param = 3
        message.parameters["timeout"].int64_param = 1_500_000
        message.parameters["pinned_version"].string_param = "2"
        assert grpc_message(asked) == message

    def test_only_requests_that_name_a_version_say_so(self) -> None:
        """Triton does not tell an instance, and a rollout must not answer them by another version."""
        anyone = replace(request({"X": np.zeros(1)}), version="")
        assert "pinned_version" not in http_parts(anyone)[0]["parameters"]
        assert "pinned_version" not in grpc_message(anyone).parameters

    def test_shared_memory_requests_equal_tritonclient(self) -> None:
        asked = request({"X": PLACE}, {"Y": RequestedOutput(shared=PLACE)})
        theirs = {}
        for library in (triton_http, triton_grpc):
            tensor, output = library.InferInput("X", [1, 3], "FP32"), library.InferRequestedOutput("Y")
            tensor.set_shared_memory("r", 12, 64)
            output.set_shared_memory("r", 12, 64)
            theirs[library] = tensor._get_tensor(), output._get_tensor()
        header, raw = http_parts(asked)
        tensor, output = theirs[triton_http]
        output["parameters"].pop("binary_data")  # false, as if it were not there
        assert (header["inputs"], header["outputs"], raw) == ([tensor], [output], b"")
        message = grpc_message(asked)
        assert (message.inputs[0], message.outputs[0]) == theirs[triton_grpc]
        assert not message.raw_input_contents

    def test_id_contract_and_plain_outputs(self) -> None:
        asked = request({"X": np.zeros(1)}, request_id="7", contract="abc")
        header, _ = http_parts(asked)
        assert (header["id"], header["parameters"]["contract"]) == ("7", "abc")
        assert header["parameters"]["binary_data_output"] is True
        message = grpc_message(asked)
        assert (message.id, message.parameters["contract"].string_param) == ("7", "abc")
        assert "contract" not in grpc_message(request()).parameters
        assert GRPC.infer(asked, 1.0, binary=True).request.request_id == "7"

    def test_no_parameter_of_ours_has_a_reserved_name(self) -> None:
        """Source: Triton, docs/protocol/extension_parameters.md (since 26.05)."""
        reserved = {"sequence_id", "sequence_start", "sequence_end", "priority", "headers"}
        asked = request({"x": np.zeros(1, np.float32)}, contract="digest", request_id="7")
        for names in (http_parts(asked)[0]["parameters"].keys(), grpc_message(asked).parameters.keys()):
            assert "contract" in names
            assert not set(names) & reserved
            assert not any(name.startswith("triton_") for name in names)

    @pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
    def test_tensor_sizes_over_grpc(self, size: int) -> None:
        array = (np.arange(size) % 251).astype(np.uint8)
        message = grpc_message(request({"X": array}))
        assert (list(message.inputs[0].shape), message.raw_input_contents[0]) == ([size], array.tobytes())

    def test_cached_header_does_not_leak_over_grpc(self) -> None:
        x = np.zeros((1, 2), np.float32)
        requests = [
            InferRequest(model=model, version=version, inputs={name: array}, outputs=outputs, request_id=own)
            for model, version, name, array, outputs, own in (
                ("m", "1", "X", x, {}, "a"),
                ("n", "1", "X", x, {}, "a"),
                ("m", "2", "X", x, {}, "a"),
                ("m", "1", "X", x.reshape(2, 1), {}, "a"),
                ("m", "1", "X", x.astype(np.int32), {}, "a"),
                ("m", "1", "Z", x, {}, "a"),
                ("m", "1", "X", x, {"Y": RequestedOutput()}, "a"),
                ("m", "1", "X", x, {}, "b"),
            )
        ]
        first, *others, last = [grpc_message(each) for each in (*requests, requests[0])]
        assert first == last
        assert all(message != first for message in others)

    @pytest.mark.parametrize(("compression", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
    def test_compressed_inference_is_the_same_inside(self, compression: Any, unpack: Any) -> None:
        asked = request({"X": np.zeros(1000, np.float32)})
        plain = HTTP.infer(asked, 1.5, binary=True).request
        packed = HttpWire(compression).infer(asked, 1.5, binary=True).request
        assert unpack(b"".join(packed.body)) == b"".join(plain.body)
        assert packed.headers["Content-Encoding"] == packed.headers["Accept-Encoding"] == compression
        assert packed.headers[LENGTH] == plain.headers[LENGTH], "of the body before it is compressed"

    def test_without_the_binary_extension_tensors_are_json(self) -> None:
        feeds = {"X": np.array([[1.5, 2]], np.float32), "N": np.array([2**62]), "B": np.array([True])}
        feeds["T"] = np.array(["a", "\u00e4".encode()], object)
        header, raw = http_parts(request(feeds, {"Y": RequestedOutput()}), binary=False)
        assert [row["data"] for row in header["inputs"]] == [[1.5, 2.0], [2**62], [True], ["a", "\u00e4"]]
        assert (header["inputs"][0]["shape"], header["outputs"], raw) == ([1, 2], [{"name": "Y"}], b"")

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros(1, np.float16),
            np.zeros(1, ml_dtypes.bfloat16),
            np.array([b"\xff"], object),
            np.array([np.nan]),
            np.array([1.0, np.inf], np.float32),
        ],
    )
    def test_json_cannot_carry(self, array: Any) -> None:
        with pytest.raises(InvalidInput, match="input 'X'"):
            http_parts(request({"X": array}), binary=False)


def http_response(body: bytes = b"", status: int = 200, **headers: str) -> HttpResponse:
    return HttpResponse(
        status=status, headers={name.replace("_", "-"): text for name, text in headers.items()}, body=body
    )


class TestDocuments:
    """Documents are equal over both protocols."""

    @pytest.mark.parametrize(("status", "expected"), [(200, True), (400, False), (503, False), (500, False)])
    def test_ready_and_live(self, status: int, expected: bool) -> None:
        assert HTTP.ready().read(http_response(status=status)) is expected
        assert HTTP.live().read(http_response(status=status)) is expected
        assert GRPC.ready().read(pb.ServerReadyResponse(ready=expected)) is expected
        assert GRPC.live().read(pb.ServerLiveResponse(live=expected)) is expected

    @pytest.mark.parametrize(
        ("status", "kind"), [(401, Unauthorized), (403, Unauthorized), (404, ModelNotFound), (429, Overloaded)]
    )
    def test_rejected_ready_request_is_an_error(self, status: int, kind: type[ClientError]) -> None:
        with pytest.raises(kind):
            HTTP.ready().read(http_response(status=status))

    @pytest.mark.parametrize(
        ("ours", "document", "message"),
        [
            (
                lambda wire: wire.model_metadata("m", ""),
                {
                    "name": "m",
                    "versions": ["1"],
                    "platform": "p",
                    "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}],
                },
                pb.ModelMetadataResponse,
            ),
            (
                lambda wire: wire.model_statistics("m", ""),
                {
                    "model_stats": [
                        {
                            "name": "7",
                            "version": "1",
                            "inference_count": 2**60,
                            "last_inference": 5,
                            "inference_stats": {"success": {"count": 3, "ns": 2**53 + 1}},
                            "batch_stats": [{"batch_size": 4, "compute_infer": {"count": 1, "ns": 9}}],
                        }
                    ]
                },
                pb.ModelStatisticsResponse,
            ),
        ],
    )
    def test_counters_are_numbers(self, ours: Callable[[Wire], Any], document: Any, message: Any) -> None:
        """Protobuf's JSON has strings for 64-bit numbers."""
        assert ours(HTTP).read(http_response(json.dumps(document).encode())) == document
        assert ours(GRPC).read(message(**document)) == document

    def test_configuration_and_index(self) -> None:
        config = {"name": "m", "max_batch_size": 8}
        assert GRPC.model_config("m", "").read(pb.ModelConfigResponse(config=config)) == config
        assert GRPC.model_config("m", "").read(pb.ModelConfigResponse()) == {}
        index = [{"name": "m", "version": "1", "state": "READY"}]
        assert HTTP.repository_index().read(http_response(json.dumps(index).encode())) == index
        assert GRPC.repository_index().read(pb.RepositoryIndexResponse(models=index)) == index
        for body in (b"{}", b"[1]", b'["m"]', b"null"):
            with pytest.raises(ProtocolError, match="list of models"):
                HTTP.repository_index().read(http_response(body))

    @pytest.mark.parametrize("body", [b"", b"null", b"<html>"])
    def test_invalid_json_documents(self, body: bytes) -> None:
        for call in (HTTP.server_metadata(), HTTP.model_config("m", ""), HTTP.infer(request(), 1.0, binary=True)):
            with pytest.raises(ProtocolError):
                call.read(http_response(body))

    def test_damaged_message(self) -> None:
        with pytest.raises(ProtocolError, match="ServerReady is damaged"):
            parse_response(b"\xff\xff\xff", GRPC.ready().request)


class TestInferResponse:
    @pytest.mark.parametrize("array", ARRAYS)
    def test_bytes_equal_tritonclient(self, array: Any) -> None:
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_grpc.InferInput("Y", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        raw = tensor._get_content() or b""
        rows = [row("N", [2]), row("Y", array.shape, datatype)]
        message = pb.ModelInferResponse(outputs=rows, raw_output_contents=[b"\7\x08", raw])
        expected = triton_grpc.InferResult(message).as_numpy("Y")
        sizes = [{"parameters": {"binary_data_size": size}} for size in (2, len(raw))]
        for response in (
            read_grpc(rows, [b"\7\x08", raw]),
            read_http([{**each, **size} for each, size in zip(rows, sizes, strict=True)], b"\7\x08" + raw),
        ):
            np.testing.assert_array_equal(response.outputs["N"], [7, 8])
            np.testing.assert_array_equal(response.outputs["Y"], expected)
            assert response.outputs["Y"].shape == array.shape
            assert (response.model, response.version) == ("m", "3")
            with pytest.raises(ValueError, match="read-only"):
                response.outputs["N"][0] = 1

    @pytest.mark.parametrize(
        ("datatype", "field", "values"),
        [
            ("BOOL", "bool_contents", [True, False]),
            ("INT8", "int_contents", [-128, 127]),
            ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
            ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
            ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
            ("UINT8", "uint_contents", [0, 255]),
            ("UINT16", "uint_contents", [0, 2**16 - 1]),
            ("UINT32", "uint_contents", [0, 2**32 - 1]),
            ("UINT64", "uint64_contents", [0, 2**64 - 1]),
            ("FP32", "fp32_contents", [0.5, -2]),
            ("FP64", "fp64_contents", [0.1, -2]),
            ("BYTES", "bytes_contents", [b"a", b""]),
        ],
    )
    def test_plain_numbers(self, datatype: str, field: str, values: list[Any]) -> None:
        data = [value.decode() if isinstance(value, bytes) else value for value in values]
        for response in (
            read_grpc([row("Y", (2, 1), datatype, contents={field: values})]),
            read_http([row("Y", (2, 1), datatype, data=data)]),
            read_http([row("Y", (2, 1), datatype, data=[[each] for each in data])]),
        ):
            array = response.outputs["Y"]
            assert array.ravel().tolist() == values
            assert (array.shape, DType.from_numpy(array.dtype).value) == ((2, 1), datatype)

    @pytest.mark.parametrize("contents", [[b"\1"], [b"", b"\1"]])
    def test_outputs_in_shared_memory_have_a_shape_only(self, contents: list[bytes]) -> None:
        """Triton sends empty contents for these outputs; other servers may omit them."""
        asked = request(outputs={"A": RequestedOutput(shared=PLACE), "B": RequestedOutput()})
        outputs = [row("A", (2, 3), "FP32"), row("B")]
        over_http = [outputs[0], {**outputs[1], "parameters": {"binary_data_size": 1}}]
        for response in (read_grpc(outputs, contents, asked), read_http(over_http, b"\1", asked)):
            assert response.shared_shapes == {"A": (2, 3)}
            assert {name: array.tolist() for name, array in response.outputs.items()} == {"B": [1]}
        alone = request(outputs={"A": RequestedOutput(shared=PLACE)})
        assert read_grpc([row("A", datatype="FP32")], [b""], alone).shared_shapes == {"A": (1,)}

    def test_output_that_came_in_the_message_after_all(self) -> None:
        """The region still holds an earlier request's."""
        asked, output = request(outputs={"A": RequestedOutput(shared=PLACE)}), row("A", datatype="FP32")
        raw = np.float32(7).tobytes()
        sized = {**output, "parameters": {"binary_data_size": 4}}
        for response in (read_grpc([output], [raw], asked), read_http([sized], raw, asked)):
            assert not response.shared_shapes
            assert response.outputs["A"].tolist() == [7]

    @pytest.mark.parametrize(
        ("asked", "answered", "fault"),
        [
            ("", [], "has no outputs"),
            ("AB", [], "lacks output 'A', lacks output 'B'"),
            ("AB", ["A"], "lacks output 'B'"),
            ("A", ["B"], "lacks output 'A', has output 'B', which was not requested"),
            ("A", ["A", "B"], "has output 'B', which was not requested"),
            ("A", ["A", "A"], "has output 'A' twice"),
            ("AB", ["A", "A"], "lacks output 'B', has output 'A' twice"),
            ("", ["A", "A"], "has output 'A' twice"),
        ],
    )
    @pytest.mark.parametrize("shared", [None, PLACE])
    def test_response_with_other_outputs(
        self, asked: str, answered: list[str], fault: str, shared: SharedTensor | None
    ) -> None:
        """As a response cache answers that ignores the requested outputs, or keeps errors."""
        wanted = request(outputs=dict.fromkeys(asked, RequestedOutput(shared=shared)))
        rows = [row(name, (1,), "FP32") for name in answered]
        sized = [{**each, "parameters": {"binary_data_size": 4}} for each in rows]
        for read in (
            lambda: read_grpc(rows, [bytes(4)] * len(rows), wanted),
            lambda: read_http(sized, bytes(4) * len(rows), wanted),
        ):
            with pytest.raises(ProtocolError, match=rf"^the response {fault} \(Triton") as caught:
                read()
            assert "response_cache" in caught.value.hint

    def test_output_of_another_type_in_shared_memory(self) -> None:
        wanted = request(outputs={"A": RequestedOutput(shared=PLACE)})
        for read in (read_grpc, read_http):
            with pytest.raises(ProtocolError, match="has output 'A' of type INT32 instead of FP32"):
                read([row("A", (1,), "INT32")], asked=wanted)

    def test_response_id_must_match(self) -> None:
        asked = request(request_id="7")
        http, rpc = [row("Y", data=[1])], [row("Y", contents={"uint_contents": [1]})]
        for read, outputs in ((read_http, http), (read_grpc, rpc)):
            assert read(outputs, asked=asked, id="7").model == "m"
            assert read(outputs, asked=asked).model == "m", "it need not come back at all"
            with pytest.raises(ProtocolError, match="request 7 has the id 8"):
                read(outputs, asked=asked, id="8")

    @pytest.mark.parametrize("length", ["x", "\u0663", "9" * 5000])
    def test_invalid_header_length_is_ignored(self, length: str) -> None:
        with contextlib.suppress(ProtocolError):  # Arabic digits are a number, too, and too small here
            assert read_http([], length=length).model == "m"

    @pytest.mark.parametrize(
        ("output", "raw"),
        [
            ({}, b""),
            (row("Y", data=[1]) | {"shape": 1}, b""),
            (row("Y", data=[1]) | {"datatype": ["FP32"]}, b""),
            (row("Y", [2], data=[1]), b""),
            (row("Y", data=["one"]), b""),
            (row("Y", datatype="FP32", parameters={}), b"\0\0\0\0"),
            (row("Y", datatype="FP32", parameters={"binary_data_size": 4}), b"\0\0\0"),
            (row("Y", [0], "FP32", parameters={"binary_data_size": -4}), b"\0\0\0\0"),
            (row("Y", datatype="FP32", parameters=None), b"\0\0\0\0"),
        ],
    )
    def test_malformed_output_over_http(self, output: dict[str, Any], raw: bytes) -> None:
        with pytest.raises(ProtocolError):
            read_http([output], raw)

    @pytest.mark.parametrize(
        ("outputs", "contents"),
        [
            ([row("A"), row("B")], [b"\1"]),
            ([row("A", (2,))], [b"\1"]),
            ([row("Y", (2,), "FP32", contents={"fp32_contents": [1]})], []),
            ([row("Y", (1,), "FP32", contents={"fp64_contents": [1]})], []),
            ([row("Y", (1,), "FP16", contents={"fp32_contents": [1]})], []),
        ],
    )
    def test_malformed_output_over_grpc(self, outputs: list[Any], contents: list[bytes]) -> None:
        with pytest.raises(ProtocolError):
            read_grpc(outputs, contents)


class TestLayouts:
    """A response over gRPC with the layout of an earlier one is not parsed, with the same result."""

    ARRAYS: ClassVar = {
        "Y": np.arange(4, dtype=np.float32).reshape(1, 4),
        "empty": np.empty((0, 2), np.int64),
        "n": np.array([7, 300], np.uint16),
    }

    @classmethod
    def response(cls, request_id: str, arrays: dict[str, Any] = ARRAYS, *, typed: bool = False) -> bytes:
        message = pb.ModelInferResponse(model_name="m", model_version="2", id=request_id)
        for name, array in arrays.items():
            datatype = DType.from_numpy(array.dtype).value
            output = message.outputs.add(name=name, datatype=datatype, shape=array.shape)
            if typed:
                output.contents.fp32_contents.extend(array.ravel())
            else:
                message.raw_output_contents.append(bytes(to_raw(array)))
        return message.SerializeToString()

    @staticmethod
    def outcome(wire: GrpcWire, response: bytes, asked: InferRequest) -> Any:
        try:
            read = wire.infer(asked, 1.0, binary=True).read(response)
        except ProtocolError as error:
            return error.message
        arrays = {name: (array.dtype, array.shape, repr(array.tolist())) for name, array in read.outputs.items()}
        return read.model, read.version, arrays, read.shared_shapes

    @pytest.mark.parametrize("ids", [("a1", "b2"), ("", "")])
    def test_the_second_response_is_not_parsed(self, ids: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        wire, (first, second) = GrpcWire(), ids
        self.outcome(wire, self.response(first), request(request_id=first))
        monkeypatch.setattr(grpc_transport, "decode_response", lambda *_: pytest.fail("it is decoded"))
        arrays = {name: array + 1 for name, array in self.ARRAYS.items()}
        call = wire.infer(request(request_id=second), 1.0, binary=True)
        found = call.read(self.response(second, arrays)).outputs
        assert [*found] == [*arrays]
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
            assert not found[name].flags.writeable

    @pytest.mark.parametrize(
        ("arrays", "typed"),
        [
            (ARRAYS, False),
            ({"Y": np.ones(3, np.float32)}, True),
            ({"s": np.array(["ab"])}, False),
            ({"s": np.empty(0, object)}, False),
        ],
    )
    def test_each_byte_counts(self, arrays: dict[str, Any], *, typed: bool) -> None:
        whole = self.response("a1", arrays, typed=typed)
        for place in range(len(whole)):
            for change in (1, 8, 0x80):
                damaged = bytearray(whole)
                damaged[place] ^= change
                wire = GrpcWire()
                self.outcome(wire, whole, request(request_id="a1"))
                for asked in (request(request_id="a1"), request(outputs=dict.fromkeys(arrays, PLAIN), request_id="a1")):
                    expected = self.outcome(GrpcWire(), bytes(damaged), asked)
                    assert self.outcome(wire, bytes(damaged), asked) == expected

    def test_other_requested_outputs_are_checked(self) -> None:
        wire = GrpcWire()
        self.outcome(wire, self.response("a1"), request(request_id="a1"))
        asked = request(outputs={"Y": PLAIN}, request_id="a1")
        assert "which was not requested" in self.outcome(wire, self.response("a1"), asked)

    def test_few_layouts_are_kept(self) -> None:
        wire = GrpcWire()
        for rows in range(600):
            self.outcome(wire, self.response("a1", {"Y": np.zeros(rows, np.uint8)}), request(request_id="a1"))
        assert len(wire._layouts) <= 256


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "no reason given"),
            (b'{"message": "x"}', '{"message": "x"}'),
            (b"[1]", "[1]"),
            (b'{"error": 7}', "7"),
            (b"\xff", "\ufffd"),
            (b"[" * 5000, bounded("[" * 5000)),
            (json.dumps({"error": "ä" * 1000}).encode(), "ä" * 1000),
            (b'{"error": "cut short\\n\\nAt:\\n  /x/model.py(97): _load\\n"}', "cut short"),
            (b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<body><hr>nginx</body>", "404 Not Found"),
            (b"\n<!DOCTYPE HTML>\n<html lang=en><head><title>\n Error response\n</title>", "Error response"),
            (b"<!doctype html><h1>no title", "<!doctype html><h1>no title"),
        ],
    )
    def test_http_error_reason(self, body: bytes, reason: str) -> None:
        error = http_error(http_response(body, 404), "7")
        assert error.message == f"the server returned 404: {reason}"
        assert error.request_id == "7"
        assert ("any gateway" in error.hint) == (b"html" in body.lower())

    def test_disabled_shared_memory_hint(self) -> None:
        """Source: Triton server, `kClientShmDisabledErrorStr` (26.08)."""
        reason = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        over_http = http_error(http_response(json.dumps({"error": reason}).encode(), 501), None)
        over_grpc = grpc_error(grpc.StatusCode.UNIMPLEMENTED, reason, None)
        for error in (over_http, over_grpc):
            assert isinstance(error, ServerError)
            assert "--allow-client-shm=true" in error.hint

    @pytest.mark.parametrize(
        ("header", "seconds"),
        [("7", 7.0), ("0", 0.0), ("", None), ("-1", None), ("1.5", None), ("Fri, 31 Dec 1999 23:59:59 GMT", None)],
    )
    def test_retry_after(self, header: str, seconds: float | None) -> None:
        assert http_error(http_response(status=429, Retry_After=header), None).retry_after_s == seconds

    KINDS: dict[str, type[ClientError]] = {  # noqa: RUF012
        "INVALID_ARGUMENT": InvalidInput,
        "NOT_FOUND": ModelNotFound,
        "UNAUTHENTICATED": Unauthorized,
        "PERMISSION_DENIED": Unauthorized,
        "RESOURCE_EXHAUSTED": Overloaded,
        "CANCELLED": DeadlineExceeded,
        "UNAVAILABLE": ModelNotReady,
    }

    @pytest.mark.parametrize("code", list(grpc.StatusCode))
    def test_grpc_status_to_error(self, code: grpc.StatusCode) -> None:
        error = grpc_error(code, "because", "7")
        assert type(error) is self.KINDS.get(code.name, ServerError)
        assert (error.status, error.body, error.request_id) == (code.name, "because", "7")

    def test_reset_stream_is_connection_failure(self) -> None:
        details = "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))"
        assert type(grpc_error(grpc.StatusCode.CANCELLED, details, "7")) is ConnectionFailed


KEYS = ["outputs", "name", "shape", "datatype", "parameters", "binary_data_size", "data", "id", "model_name"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    document=st.recursive(
        VALUES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        max_leaves=15,
    ),
    tail=st.binary(max_size=20),
)
def test_generated_responses_over_http(document: Any, tail: bytes) -> None:
    head = json.dumps(document).encode()
    received = HttpResponse(status=200, headers={LENGTH: str(len(head))}, body=head + tail)
    with contextlib.suppress(ProtocolError):
        HTTP.infer(request(request_id="1"), 1.0, binary=True).read(received)


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(st.sampled_from(["Y", "Z"]), max_size=3),
    datatype=st.sampled_from(["FP32", "BYTES", "BF16", "INT8", "X"]),
    shape=st.lists(st.integers(-3, 2**62), max_size=3),
    raw=st.lists(st.binary(max_size=12), max_size=3),
)
def test_generated_responses_over_grpc(names: list[str], datatype: str, shape: list[int], raw: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        read_grpc([row(name, shape, datatype) for name in names], raw)
