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
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

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
from graphkiln_client.transports.base import Call, InferRequest
from graphkiln_client.transports.grpc_wire import GrpcRequest, GrpcWire, grpc_error, parse_response

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
