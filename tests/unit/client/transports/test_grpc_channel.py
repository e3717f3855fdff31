"""Channels and errors of the gRPC transports."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from canned import GRPC_INFERRED, CannedGrpc

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, InvalidInput, ModelNotReady
from graphkiln_client import Client
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.grpc_transport import open_channel, translate_error
from graphkiln_client.transports.grpc_wire import GrpcWire

ENDPOINT = Endpoint.parse("grpc://me:s3cret@host:8001", {"X-Token": "Abc"}, None)
REQUEST = GrpcWire().ready().request


class Error(grpc.RpcError):
    """As grpcio raises it."""

    def __init__(self, code: grpc.StatusCode, details: str | None = "because") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


def translate(code: grpc.StatusCode, *, reachable: bool = True, details: str | None = "because") -> ClientError:
    return translate_error(Error(code, details), ENDPOINT, Deadline.after(1.5), REQUEST, reachable=reachable)


class TestErrors:
    def test_a_deadline_says_how_long_was_waited(self) -> None:
        error = translate(grpc.StatusCode.DEADLINE_EXCEEDED)
        assert type(error) is DeadlineExceeded
        assert str(error) == "no response from grpc://host:8001 within 1.5 s"
        assert error.status == "DEADLINE_EXCEEDED"

    def test_unavailable_is_two_things(self) -> None:
        """Nobody there, or a server that says: not now."""
        assert type(translate(grpc.StatusCode.UNAVAILABLE)) is ModelNotReady
        error = translate(grpc.StatusCode.UNAVAILABLE, reachable=False)
        assert type(error) is ConnectionFailed
        assert "cannot reach grpc://host:8001: because" in str(error)
        assert "is a server running there" in error.hint

    @pytest.mark.parametrize("code", list(grpc.StatusCode))
    def test_no_error_shows_a_secret_and_none_needs_details(self, code: grpc.StatusCode) -> None:
        for reachable in (True, False):
            error = translate(code, reachable=reachable, details=None)
            assert "s3cret" not in f"{error} {error!r}"
            assert error.status == code.name


class TestOpenChannel:
    @pytest.mark.parametrize("library", [grpc, grpc.aio])
    def test_a_ca_file_that_is_missing(self, library: Any, tmp_path: Path) -> None:
        endpoint = Endpoint.parse("grpcs://host", {}, tmp_path / "ca.pem")
        with pytest.raises(InvalidInput, match=r"ca\.pem"):
            open_channel(library, endpoint, "")

    @pytest.mark.parametrize("compression", ["", "gzip", "deflate"])
    def test_requests_are_compressed_as_told(self, compression: Any) -> None:
        with CannedGrpc([GRPC_INFERRED]) as server, Client(server.url, compression=compression) as client:
            assert client.model("m").infer({})["Y"] == [2]

    def test_no_proxy_is_asked_for_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with CannedGrpc([GRPC_INFERRED]) as server, Client(server.url, max_retries=0) as client:
            assert client.model("m").infer({})["Y"] == [2]

    def test_an_ipv6_address_is_in_brackets(self) -> None:
        seen: list[str] = []

        class Library:
            @staticmethod
            def insecure_channel(target: str, **_: Any) -> None:
                seen.append(target)

        open_channel(Library, Endpoint.parse("grpc://[::1]:9", {}, None), "")
        assert seen == ["[::1]:9"]


def test_a_connection_may_take_as_long_as_a_slow_network_or_a_busy_server_needs() -> None:
    with CannedGrpc([GRPC_INFERRED]) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=_relay_late, args=(listener, server.port, 0.5))
        relay.start()
        with Client(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20, max_retries=0) as client:
            assert client.model("m").infer({})["Y"] == [2]
        relay.join()


def _relay_late(listener: socket.socket, port: int, delay_s: float) -> None:
    """Relays one connection, whose first bytes it holds back."""
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
