"""Triton's repository extension over gRPC."""

from __future__ import annotations

import grpc
import pytest
from canned import CannedGrpc, CannedHttp, http
from running import free_ports
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.grpc_control import BothControls, GrpcControl
from graphkiln_backend.server.repository_control import HttpControl, VersionState


def address(port: int) -> ListenAddress:
    return ListenAddress(protocol="gRPC", host="127.0.0.1", port=port)


def control(port: int) -> GrpcControl:
    return GrpcControl(address(port), [("triton-grpc-protocol-x-key", "secret")])


def test_the_index_with_the_key() -> None:
    rows = [{"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "no graph"}, {"name": "b"}]
    with CannedGrpc([pb.RepositoryIndexResponse(models=rows).SerializeToString()]) as server:
        assert control(server.port).index() == [
            VersionState(model="a", version="1", state="UNAVAILABLE", reason="no graph"),
            VersionState(model="b", version="", state="UNLOADED", reason=""),
        ]
        assert server.metadata[0]["triton-grpc-protocol-x-key"] == "secret"


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that seems to hang is restarted: over gRPC alone, each would be, wherever a proxy is named."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with CannedGrpc([b""]) as server:
        assert control(server.port).index() == []


def test_a_load_says_nothing_or_why_it_failed() -> None:
    with CannedGrpc([b"", (grpc.StatusCode.INVALID_ARGUMENT, "no graph")]) as server:
        assert control(server.port).load("m", 5) == ""
        assert control(server.port).load("m", 5) == "no graph"


def test_a_load_without_a_response_is_an_error() -> None:
    with CannedGrpc([(grpc.StatusCode.UNAVAILABLE, "stopping")]) as server, pytest.raises(OSError, match="stopping"):
        control(server.port).load("m", 5)


def test_the_rest_fails_as_an_error() -> None:
    denied = (grpc.StatusCode.UNAVAILABLE, "denied")
    with CannedGrpc([b"", denied, denied]) as server:
        control(server.port).unload("m")
        with pytest.raises(OSError, match="denied"):
            control(server.port).unload("m")
        with pytest.raises(OSError, match="denied"):
            control(server.port).index()


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(OSError, match="gRPC"):
        control(free_ports(1)[0]).index()


def test_with_both_only_loads_go_over_grpc() -> None:
    with CannedGrpc([b""]) as over_grpc, CannedHttp([http(b"[]"), http(b"")]) as over_http:
        both = BothControls(HttpControl(address(over_http.port)), control(over_grpc.port))
        assert both.index() == []
        assert both.load("m", 5) == ""
        both.unload("m")
        assert [method.rpartition("/")[2] for method in over_grpc.methods] == ["RepositoryModelLoad"]
