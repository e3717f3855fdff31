"""Both gRPC transports beside servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from canned import GRPC_INFERRED, CannedGrpc
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.graph.dtypes import AnyArray
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
)
from graphkiln_client import AsyncClient, Client

Infer = Callable[..., dict[str, AnyArray]]


class TestGrpc:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (grpc.StatusCode.NOT_FOUND, ModelNotFound),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
            (grpc.StatusCode.UNAVAILABLE, ModelNotReady),
            (grpc.StatusCode.INTERNAL, ServerError),
        ],
    )
    def test_status_to_error(self, infer: Infer, code: grpc.StatusCode, kind: type[ClientError]) -> None:
        with CannedGrpc([(code, "because")]) as server:
            with pytest.raises(kind) as caught:
                infer(server.url, max_retries=0)
            assert type(caught.value) is kind
            assert caught.value.status == code.name
            assert server.methods == ["ModelInfer"]

    @pytest.mark.parametrize(
        "answer",
        [
            b"\xff\xff\xff",
            pb.ModelInferResponse(
                outputs=[{"name": "Y", "datatype": "FP32"}], raw_output_contents=[b"", b""]
            ).SerializeToString(),
            pb.ModelInferResponse(id="of another").SerializeToString(),
            pb.ModelInferResponse(outputs=[{"name": "Y", "datatype": "FP99", "shape": [1]}]).SerializeToString(),
            pb.ModelInferResponse(outputs=[{"name": "Y", "datatype": "FP32", "shape": [2]}]).SerializeToString(),
        ],
    )
    def test_garbage(self, infer: Infer, answer: bytes) -> None:
        with CannedGrpc([answer]) as server, pytest.raises(ProtocolError):
            infer(server.url)

    def test_unavailable_is_tried_again(self, infer: Infer) -> None:
        with CannedGrpc([(grpc.StatusCode.UNAVAILABLE, "later"), GRPC_INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]

    def test_a_slow_server(self, infer: Infer) -> None:
        with CannedGrpc([1.0]) as server, pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
            infer(server.url, timeout_s=0.3)

    def test_a_server_that_is_not_there(self, infer: Infer) -> None:
        with pytest.raises(ConnectionFailed, match=r"cannot reach grpc://127\.0\.0\.1:9") as caught:
            infer("grpc://127.0.0.1:9", max_retries=0)
        assert caught.value.status == "UNAVAILABLE"

    def test_a_closed_client(self) -> None:
        with CannedGrpc([GRPC_INFERRED]) as server:
            with Client(server.url) as client:
                model = client.model("m")
                model.infer({})
            with pytest.raises(InvalidInput, match="is closed"):
                model.infer({})

    def test_a_closed_client_in_an_event_loop(self) -> None:
        async def main(url: str) -> None:
            async with AsyncClient(url) as client:
                model = client.model("m")
                await model.infer({})
            with pytest.raises(InvalidInput, match="is closed"):
                await model.infer({})

        with CannedGrpc([GRPC_INFERRED]) as server:
            asyncio.run(main(server.url))

    def test_headers_become_metadata(self, infer: Infer) -> None:
        with CannedGrpc([GRPC_INFERRED]) as server:
            infer(server.url, headers={"Authorization": "Bearer s3cret"})
            assert server.metadata[0]["authorization"] == "Bearer s3cret"
