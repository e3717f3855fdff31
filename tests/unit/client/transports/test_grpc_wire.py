"""gRPC requests and responses, without a channel; beside those of tritonclient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from canned import CannedGrpc
from google.protobuf.internal import encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.grpc import service_pb2 as pb
from wire_arrays import ARRAYS

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ClientError,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_client.transports.base import Call, InferRequest, InferResponse, RequestedOutput, SharedTensor
from graphkiln_client.transports.grpc_wire import (
    GrpcRequest,
    GrpcWire,
    _varint,
    decode_response,
    encode_request,
    grpc_error,
    parse_response,
)

WIRE = GrpcWire()


class TestRequests:
    """What tritonclient calls is the reference."""

    @pytest.mark.parametrize(
        ("ours", "theirs", "message"),
        [
            (WIRE.ready(), lambda client: client.is_server_ready(), pb.ServerReadyRequest()),
            (
                WIRE.model_metadata("m", "2"),
                lambda client: client.get_model_metadata("m", "2"),
                pb.ModelMetadataRequest(name="m", version="2"),
            ),
            (
                WIRE.model_config("m", ""),
                lambda client: client.get_model_config("m"),
                pb.ModelConfigRequest(name="m"),
            ),
            (
                WIRE.model_statistics("m", "2"),
                lambda client: client.get_inference_statistics("m", "2"),
                pb.ModelStatisticsRequest(name="m", version="2"),
            ),
            (
                WIRE.repository_index(),
                lambda client: client.get_model_repository_index(),
                pb.RepositoryIndexRequest(),
            ),
            (
                WIRE.load("m"),
                lambda client: client.load_model("m"),
                pb.RepositoryModelLoadRequest(model_name="m"),
            ),
            (
                WIRE.load("m", '{"a": 1}'),
                lambda client: client.load_model("m", config='{"a": 1}'),
                pb.RepositoryModelLoadRequest(
                    model_name="m", parameters={"config": pb.ModelRepositoryParameter(string_param='{"a": 1}')}
                ),
            ),
            (
                WIRE.unload("m"),
                lambda client: client.unload_model("m"),
                pb.RepositoryModelUnloadRequest(model_name="m"),
            ),
            (
                WIRE.register_region("r", "/r", 64),
                lambda client: client.register_system_shared_memory("r", "/r", 64),
                pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=64),
            ),
            (
                WIRE.region_status("r"),
                lambda client: client.get_system_shared_memory_status("r"),
                pb.SystemSharedMemoryStatusRequest(name="r"),
            ),
            (
                WIRE.unregister_region("r"),
                lambda client: client.unregister_system_shared_memory("r"),
                pb.SystemSharedMemoryUnregisterRequest(name="r"),
            ),
        ],
    )
    def test_are_those_of_tritonclient(self, ours: Call[Any], theirs: Callable[[Any], Any], message: Any) -> None:
        with CannedGrpc([b""]) as server:
            client = triton_grpc.InferenceServerClient(server.url.removeprefix("grpc://"))
            theirs(client)
            client.close()
            (method,) = server.methods
        request: GrpcRequest = ours.request
        assert request.method == f"/inference.GRPCInferenceService/{method}"
        assert request.message == message.SerializeToString()

    def test_an_inference_carries_its_id_for_errors(self) -> None:
        request = InferRequest(model="m", version="", inputs={"X": np.zeros(2, np.float32)}, request_id="7")
        sent: GrpcRequest = WIRE.infer(request, 1.5, binary=False).request
        assert sent.request_id == "7"
        message = pb.ModelInferRequest.FromString(sent.message)
        assert (message.id, message.parameters["timeout"].int64_param) == ("7", 1_500_000)
        assert message.raw_input_contents == [b"\0" * 8], "binary whatever the server's extensions"


class TestResponses:
    @pytest.mark.parametrize("value", [True, False])
    def test_ready_and_live(self, value: bool) -> None:
        assert WIRE.ready().read(pb.ServerReadyResponse(ready=value)) is value
        assert WIRE.live().read(pb.ServerLiveResponse(live=value)) is value

    def test_metadata_are_as_in_json(self) -> None:
        tensor = {"name": "X", "datatype": "FP32", "shape": [-1, 3]}
        message = pb.ModelMetadataResponse(name="m", versions=["1"], platform="p", inputs=[tensor])
        document = WIRE.model_metadata("m", "").read(message)
        assert document["inputs"] == [tensor], "shapes are numbers, where protobuf's JSON has strings"
        assert (document["name"], document["versions"], "outputs" in document) == ("m", ["1"], False)

    def test_the_configuration(self) -> None:
        message = pb.ModelConfigResponse(config={"name": "m", "max_batch_size": 8})
        assert WIRE.model_config("m", "").read(message) == {"name": "m", "max_batch_size": 8}
        assert WIRE.model_config("m", "").read(pb.ModelConfigResponse()) == {}

    def test_statistics_are_numbers_as_in_json(self) -> None:
        message = pb.ModelStatisticsResponse(
            model_stats=[
                {
                    "name": "7",
                    "version": "1",
                    "inference_count": 2**60,
                    "last_inference": 5,
                    "inference_stats": {"success": {"count": 3, "ns": 2**53 + 1}},
                    "batch_stats": [{"batch_size": 4, "compute_infer": {"count": 1, "ns": 9}}],
                }
            ]
        )
        (row,) = WIRE.model_statistics("m", "").read(message)["model_stats"]
        assert (row["name"], row["version"]) == ("7", "1"), "names stay strings"
        assert (row["inference_count"], row["last_inference"]) == (2**60, 5)
        assert row["inference_stats"]["success"] == {"count": 3, "ns": 2**53 + 1}
        assert row["batch_stats"] == [{"batch_size": 4, "compute_infer": {"count": 1, "ns": 9}}]

    def test_the_index(self) -> None:
        message = pb.RepositoryIndexResponse(models=[{"name": "m", "version": "1", "state": "READY"}])
        assert WIRE.repository_index().read(message) == [{"name": "m", "version": "1", "state": "READY"}]
        assert WIRE.repository_index().read(pb.RepositoryIndexResponse()) == []

    @pytest.mark.parametrize("call", [WIRE.load("m"), WIRE.unload("m"), WIRE.region_status("r")])
    def test_some_calls_return_nothing_but_success(self, call: Call[Any]) -> None:
        assert call.read(object()) is None

    def test_a_damaged_message(self) -> None:
        with pytest.raises(ProtocolError, match=r"response to /inference.*/ServerReady is damaged"):
            parse_response(b"\xff\xff\xff", WIRE.ready().request)


class TestErrors:
    KINDS: dict[grpc.StatusCode, type[ClientError]] = {  # noqa: RUF012
        grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
        grpc.StatusCode.NOT_FOUND: ModelNotFound,
        grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
        grpc.StatusCode.PERMISSION_DENIED: Unauthorized,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.CANCELLED: DeadlineExceeded,
        grpc.StatusCode.UNAVAILABLE: ModelNotReady,
    }

    @pytest.mark.parametrize("code", list(grpc.StatusCode))
    def test_every_status_is_an_error_of_ours(self, code: grpc.StatusCode) -> None:
        error = grpc_error(code, "because", "7")
        assert type(error) is self.KINDS.get(code, ServerError)
        assert (error.status, error.body, error.request_id) == (code.name, "because", "7")
        assert error.message == f"the server returned {code.name}: because"
        assert ("lists what is served" in error.hint) is (code is grpc.StatusCode.NOT_FOUND)


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(st.sampled_from(["Y", "Z"]), max_size=3),
    datatype=st.sampled_from(["FP32", "BYTES", "BF16", "INT8", "X"]),
    shape=st.lists(st.integers(-3, 2**62), max_size=3),
    raw=st.lists(st.binary(max_size=12), max_size=3),
)
def test_whatever_the_response_the_error_is_ours(
    names: list[str], datatype: str, shape: list[int], raw: list[bytes]
) -> None:
    outputs = [{"name": name, "datatype": datatype, "shape": shape} for name in names]
    call = GrpcWire().infer(InferRequest(model="m", version="", inputs={}), 1.0, binary=True)
    with contextlib.suppress(ProtocolError):
        call.read(pb.ModelInferResponse(outputs=outputs, raw_output_contents=raw))


# Messages of gRPC, beside those of tritonclient.


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
    assert service_pb2.ModelInferRequest.FromString(encode_request(request, None)) == theirs


@given(number=st.integers(0, 2**40))
def test_a_length_is_written_as_protocol_buffers_do(number: int) -> None:
    assert _varint(number) == encoder._VarintBytes(number)


PLACE = SharedTensor(region="r", offset=64, size_bytes=12, datatype=DType.FP32, shape=(1, 3))


def encode(request: InferRequest, timeout_s: float | None = None) -> Any:
    return service_pb2.ModelInferRequest.FromString(encode_request(request, timeout_s))


class TestEncodeRequest:
    def test_bytes_follow_in_the_order_of_the_inputs(self) -> None:
        feeds = {"A": np.array([1], np.uint8), "T": np.array([b"ab"], object), "B": np.array([2], np.int16)}
        message = encode(InferRequest(model="m", version="", inputs=feeds))
        assert [row.name for row in message.inputs] == ["A", "T", "B"]
        assert list(message.raw_input_contents) == [b"\1", b"\2\0\0\0ab", b"\2\0"]

    @pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
    def test_tensors_of_every_size(self, size: int) -> None:
        array = (np.arange(size) % 251).astype(np.uint8)
        message = encode(InferRequest(model="m", version="", inputs={"X": array}))
        assert list(message.inputs[0].shape) == [size]
        assert message.raw_input_contents[0] == array.tobytes()

    def test_the_contract_that_it_is_made_for(self) -> None:
        asked = InferRequest(model="m", version="", inputs={}, contract="abc")
        assert encode(asked).parameters["contract"].string_param == "abc"
        assert "contract" not in encode(InferRequest(model="m", version="", inputs={})).parameters

    def test_tensors_in_shared_memory_are_no_bytes(self) -> None:
        outputs = {"Y": RequestedOutput(shared=PLACE)}
        message = encode(InferRequest(model="m", version="", inputs={"X": PLACE}, outputs=outputs))
        tensor = triton_grpc.InferInput("X", [1, 3], "FP32")
        tensor.set_shared_memory("r", 12, 64)
        output = triton_grpc.InferRequestedOutput("Y")
        output.set_shared_memory("r", 12, 64)
        expected = service_pb2.ModelInferRequest(model_name="m")
        expected.inputs.append(tensor._get_tensor())
        expected.outputs.append(output._get_tensor())
        assert message == expected

    def test_requests_of_a_kind_share_what_is_the_same(self) -> None:
        """What is kept of one request must not show in the next one of another model, shape, type, id or output."""
        base = InferRequest(model="m", version="1", inputs={"X": np.zeros((1, 2), np.float32)}, request_id="a")
        others = [
            InferRequest(model="n", version="1", inputs=base.inputs),
            InferRequest(model="m", version="2", inputs=base.inputs),
            InferRequest(model="m", version="1", inputs={"X": np.zeros((2, 1), np.float32)}),
            InferRequest(model="m", version="1", inputs={"X": np.zeros((1, 2), np.int32)}),
            InferRequest(model="m", version="1", inputs={"Z": np.zeros((1, 2), np.float32)}),
            InferRequest(model="m", version="1", inputs=base.inputs, outputs={"Y": RequestedOutput()}),
            InferRequest(model="m", version="1", inputs=base.inputs, request_id="b"),
        ]
        messages = [encode(request) for request in (base, *others, base)]
        assert messages[0] == messages[-1]
        assert all(message != messages[0] for message in messages[1:-1])


def decode(request: InferRequest | None = None, **fields: Any) -> InferResponse:
    message = service_pb2.ModelInferResponse(model_name="m", model_version="3", **fields)
    return decode_response(message, request or InferRequest(model="m", version="", inputs={}))


def shared(*names: str) -> InferRequest:
    outputs = {"A": RequestedOutput(), "B": RequestedOutput(), **dict.fromkeys(names, RequestedOutput(shared=PLACE))}
    return InferRequest(model="m", version="", inputs={}, outputs=outputs)


def row(name: str, shape: Any = (1,), datatype: str = "UINT8", **contents: Any) -> dict[str, Any]:
    fields = {"contents": contents} if contents else {}
    return {"name": name, "datatype": datatype, "shape": list(shape), **fields}


class TestDecodeResponse:
    @pytest.mark.parametrize("array", ARRAYS)
    def test_bytes_are_read_as_tritonclient_reads_them(self, array: Any) -> None:
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_grpc.InferInput("Y", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        rows = [row("N", [2]), row("Y", array.shape, datatype)]
        contents = [b"\7\x08", tensor._get_content() or b""]
        message = service_pb2.ModelInferResponse(model_name="m", outputs=rows, raw_output_contents=contents)
        ours = decode_response(message, InferRequest(model="m", version="", inputs={}))
        np.testing.assert_array_equal(ours.outputs["N"], [7, 8])
        np.testing.assert_array_equal(ours.outputs["Y"], triton_grpc.InferResult(message).as_numpy("Y"))
        assert ours.outputs["Y"].shape == array.shape

    @pytest.mark.parametrize("contents", [[b"\1"], [b"", b"\1"]])
    def test_some_outputs_in_shared_memory(self, contents: list[bytes]) -> None:
        """Triton leaves an empty place for them; a server that does not is understood, too."""
        response = decode(shared("A"), outputs=[row("A", (2, 3)), row("B")], raw_output_contents=contents)
        assert response.shared_shapes == {"A": (2, 3)}
        assert {name: array.tolist() for name, array in response.outputs.items()} == {"B": [1]}

    def test_all_outputs_in_shared_memory(self) -> None:
        response = decode(shared("A", "B"), outputs=[row("A"), row("B")], raw_output_contents=[b"", b""])
        assert response.shared_shapes == {"A": (1,), "B": (1,)}
        assert response.outputs == {}

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
    def test_the_messages_own_numbers(self, datatype: str, field: str, values: list[Any]) -> None:
        array = decode(outputs=[row("Y", (2, 1), datatype, **{field: values})]).outputs["Y"]
        assert array.ravel().tolist() == values
        assert (array.shape, DType.from_numpy(array.dtype).value) == ((2, 1), datatype)

    @pytest.mark.parametrize(
        "output",
        [
            row("Y", (2,), "FP32", fp32_contents=[1]),
            row("Y", (1,), "FP32", fp64_contents=[1]),
            row("Y", (1,), "FP16", fp32_contents=[1]),
            row("Y", (1,), "BF16", fp32_contents=[1]),
            row("Y", (1,), "UINT8", uint_contents=[256]),
            row("Y", (1,), "INT8", int_contents=[-129]),
            row("Y", (1,), "FP31", fp32_contents=[1]),
            row("Y", (-2,), "FP32", fp32_contents=[1]),
        ],
    )
    def test_numbers_that_are_not_the_tensor(self, output: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError):
            decode(outputs=[output])

    @pytest.mark.parametrize(
        ("outputs", "contents"),
        [
            ([row("A"), row("B")], [b"\1"]),
            ([row("A")], [b"\1", b"\2"]),
            ([], [b"\1"]),
            ([row("A", (2,))], [b"\1"]),
            ([row("A", (-1,))], [b"\1"]),
            ([row("A", datatype="FP31")], [b"\1"]),
        ],
    )
    def test_contents_that_do_not_fit(self, outputs: list[Any], contents: list[bytes]) -> None:
        with pytest.raises(ProtocolError):
            decode(outputs=outputs, raw_output_contents=contents)

    def test_an_id_that_was_sent_must_come_back(self) -> None:
        request = InferRequest(model="m", version="", inputs={}, request_id="7")
        assert decode(request, id="7").model == "m"
        assert decode(request).model == "m", "it need not come back at all"
        with pytest.raises(ProtocolError, match="request 7 has the id 8"):
            decode(request, id="8")
