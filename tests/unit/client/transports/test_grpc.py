"""gRPC transports with faulty servers."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
    ProtocolError,
)
from graphkiln_client import AsyncClient, Client
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.grpc_transport import GrpcWire, translate_error

Infer = Callable[..., dict[str, AnyArray]]


class TestGrpc:
    @pytest.mark.parametrize(
        "answer",
        [
            b"\xff\xff\xff",
            pb.ModelInferResponse(
                outputs=[{"name": "Y", "datatype": "FP32"}], raw_output_contents=[b"", b""]
            ).SerializeToString(),
            pb.ModelInferResponse(id="of another").SerializeToString(),
        ],
    )
    def test_garbage(self, infer: Infer, answer: bytes) -> None:
        with CannedGrpc([answer]) as server, pytest.raises(ProtocolError):
            infer(server.url)

    def test_unavailable_is_retried(self, infer: Infer) -> None:
        with CannedGrpc([(grpc.StatusCode.UNAVAILABLE, "later"), GRPC_INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]

    def test_slow_server(self, infer: Infer) -> None:
        with CannedGrpc([1.0]) as server, pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
            infer(server.url, timeout_s=0.3)

    def test_unreachable_server(self, infer: Infer) -> None:
        with pytest.raises(ConnectionFailed, match=r"cannot reach grpc://127\.0\.0\.1:9") as caught:
            infer("grpc://127.0.0.1:9", max_retries=0)
        assert caught.value.status == "UNAVAILABLE"

    def test_closed_client(self) -> None:
        with CannedGrpc([GRPC_INFERRED]) as server:
            with Client(server.url) as client:
                model = client.model("m")
                model.infer({})
            with pytest.raises(InvalidInput, match="is closed"):
                model.infer({})

    def test_closed_client_in_an_event_loop(self) -> None:
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


# Channels and errors of the gRPC transports.

ENDPOINT = Endpoint.parse("grpc://me:s3cret@host:8001", {"X-Token": "Abc"}, None)
REQUEST = GrpcWire().ready().request


class Error(grpc.RpcError):
    """A `grpc.RpcError` with a code and details."""

    def __init__(self, code: grpc.StatusCode, details: str | None = "because") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


def translate(code: grpc.StatusCode, *, reachable: bool = True, details: str | None = "because") -> ClientError:
    return translate_error(Error(code, details), ENDPOINT, Deadline.after(1.5), REQUEST, reachable=reachable)


class TestErrors:
    @pytest.mark.parametrize("code", list(grpc.StatusCode))
    def test_errors_show_no_secret(self, code: grpc.StatusCode) -> None:
        for reachable in (True, False):
            error = translate(code, reachable=reachable, details=None)
            assert "s3cret" not in f"{error} {error!r}"
            assert error.status == code.name


class TestOpenChannel:
    @pytest.mark.parametrize("compression", ["", "gzip", "deflate"])
    def test_request_compression(self, compression: Any) -> None:
        with CannedGrpc([GRPC_INFERRED]) as server, Client(server.url, compression=compression) as client:
            assert client.model("m").infer({})["Y"] == [2]

    def test_no_proxy_for_localhost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with CannedGrpc([GRPC_INFERRED]) as server, Client(server.url, max_retries=0) as client:
            assert client.model("m").infer({})["Y"] == [2]


def test_slow_connection_is_awaited() -> None:
    with CannedGrpc([GRPC_INFERRED]) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=_relay_late, args=(listener, server.port, 0.5))
        relay.start()
        with Client(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20, max_retries=0) as client:
            assert client.model("m").infer({})["Y"] == [2]
        relay.join()


def _relay_late(listener: socket.socket, port: int, delay_s: float) -> None:
    """Relay one connection after a delay."""
    near, _ = listener.accept()
    time.sleep(delay_s)
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        ends = {near: far, far: near}
        with suppress(OSError):
            while True:
                for ready in select.select(list(ends), [], [])[0]:
                    if not (data := ready.recv(1 << 16)):
                        return
                    ends[ready].sendall(data)
