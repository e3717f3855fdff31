"""Triton's repository extension over HTTP."""

from __future__ import annotations

import json

import grpc
import pytest
from canned import CannedGrpc, CannedHttp, hang_up, http
from running import free_ports
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.repository_control import LoadOverride, RepositoryControl, VersionState


def address(port: int, protocol: str = "HTTP") -> ListenAddress:
    return ListenAddress(protocol=protocol, host="127.0.0.1", port=port)


def control(port: int) -> RepositoryControl:
    return RepositoryControl(http=address(port), headers={"x-key": "secret"})


def test_the_index_with_the_key() -> None:
    rows = [{"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "no graph"}, {"name": "b"}]
    with CannedHttp([http(json.dumps(rows).encode())]) as server:
        states = control(server.port).index()
    assert states == [
        VersionState(model="a", version="1", state="UNAVAILABLE", reason="no graph"),
        VersionState(model="b", version="", state="UNLOADED", reason=""),
    ]
    assert server.requests[0].startswith(b"POST /v2/repository/index HTTP/1.1\r\n")
    assert b"x-key: secret\r\n" in server.requests[0]


@pytest.mark.parametrize(
    ("state", "reason", "failed"),
    [
        ("UNAVAILABLE", "no graph", True),
        ("UNAVAILABLE", "unloaded", False),
        ("READY", "", False),
        ("LOADING", "", False),
    ],
)
def test_unloaded_is_not_failed(state: str, reason: str, failed: bool) -> None:
    assert VersionState(model="a", version="1", state=state, reason=reason).failed is failed


def test_a_load_that_works_says_nothing() -> None:
    with CannedHttp([http(b"")]) as server:
        assert control(server.port).load("a b/c", 5) == ""
    assert server.requests[0].startswith(b"POST /v2/repository/models/a%20b%2Fc/load HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("body", "words"), [(b'{"error": "no graph"}', "no graph"), (b"?", "status 400"), (b"[]", "status 400")]
)
def test_a_load_that_fails_says_why(body: bytes, words: str) -> None:
    with CannedHttp([http(body, "400 Bad Request")]) as server:
        assert control(server.port).load("a", 5) == words


STATISTICS = {
    "name": "a b", "version": "2", "last_inference": 1795928805584, "inference_count": 7, "execution_count": 3,
    "inference_stats": {"success": {"count": 5, "ns": 90}, "queue": {"count": 5, "ns": 40}},
    "batch_stats": [{"batch_size": 8, "compute_input": {"count": 9, "ns": 1}, "compute_infer": {"count": 2, "ns": 60}}],
    "memory_usage": [],
}  # fmt: skip
COUNTERS = {
    "inference_count": 7, "execution_count": 3, "batches of 8": 2,
    "success count": 5, "success ns": 90, "queue count": 5, "queue ns": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "counters"),
    [
        (json.dumps({"model_stats": [STATISTICS]}).encode(), "200 OK", COUNTERS),
        (b'{"model_stats": [{"name": "a b", "version": "2", "inference_count": 7}]}', "200 OK", {"inference_count": 7}),
        (b'{"model_stats": []}', "200 OK", {}),
        (b'{"model_stats": [{"inference_stats": []}]}', "200 OK", {}),
        (b'{"error": "not ready"}', "400 Bad Request", {}),
        (b"?", "200 OK", {}),
    ],
)
def test_counters(body: bytes, status: str, counters: dict[str, int]) -> None:
    with CannedHttp([http(body, status)]) as server:
        assert control(server.port).read_counters("a b", 2) == counters
    assert server.requests[0].startswith(b"GET /v2/models/a%20b/versions/2/stats HTTP/1.1\r\n")


def test_something_else_than_the_folder_is_sent_along() -> None:
    with CannedHttp([http(b"")]) as server:
        override = LoadOverride(config='{"backend": "python"}', files={"1/model.py": "pass"})
        assert control(server.port).load("a", 5, override) == ""
    sent = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
    assert sent == {"parameters": {"config": '{"backend": "python"}', "file:1/model.py": "cGFzcw=="}}


def test_an_unload_that_fails_is_an_error() -> None:
    with CannedHttp([http(b'{"error": "denied"}', "403 Forbidden")]) as server, pytest.raises(OSError, match="denied"):
        control(server.port).unload("a")


@pytest.mark.parametrize(
    "answer", [http(b"", "503 Service Unavailable"), hang_up, http(b"{"), http(b"[{}]"), http(b'{"error": "no"}')]
)
def test_no_index_is_an_error(answer: object) -> None:
    with CannedHttp([answer]) as server, pytest.raises(OSError, match=r"port \d+|reset|closed"):  # type: ignore[list-item]
        control(server.port).index()


def test_no_server_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        control(free_ports(1)[0]).index()


# Triton's repository extension over gRPC.


def grpc_control(port: int) -> RepositoryControl:
    return RepositoryControl(grpc=address(port, "gRPC"), metadata=[("triton-grpc-protocol-x-key", "secret")])


def test_the_index_over_grpc_with_the_key() -> None:
    rows = [{"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "no graph"}, {"name": "b"}]
    with CannedGrpc([pb.RepositoryIndexResponse(models=rows).SerializeToString()]) as server:
        assert grpc_control(server.port).index() == [
            VersionState(model="a", version="1", state="UNAVAILABLE", reason="no graph"),
            VersionState(model="b", version="", state="UNLOADED", reason=""),
        ]
        assert server.metadata[0]["triton-grpc-protocol-x-key"] == "secret"


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that seems to hang is restarted: over gRPC alone, each would be, wherever a proxy is named."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with CannedGrpc([b""]) as server:
        assert grpc_control(server.port).index() == []


def test_a_load_says_nothing_or_why_it_failed() -> None:
    with CannedGrpc([b"", (grpc.StatusCode.INVALID_ARGUMENT, "no graph")]) as server:
        assert grpc_control(server.port).load("m", 5) == ""
        assert grpc_control(server.port).load("m", 5) == "no graph"


def test_a_load_without_a_response_is_an_error() -> None:
    with CannedGrpc([(grpc.StatusCode.UNAVAILABLE, "stopping")]) as server, pytest.raises(OSError, match="stopping"):
        grpc_control(server.port).load("m", 5)


def test_the_rest_fails_as_an_error() -> None:
    denied = (grpc.StatusCode.UNAVAILABLE, "denied")
    with CannedGrpc([b"", denied, denied]) as server:
        grpc_control(server.port).unload("m")
        with pytest.raises(OSError, match="denied"):
            grpc_control(server.port).unload("m")
        with pytest.raises(OSError, match="denied"):
            grpc_control(server.port).index()


def test_a_port_without_a_grpc_server_is_an_error() -> None:
    with pytest.raises(OSError, match="gRPC"):
        grpc_control(free_ports(1)[0]).index()


def test_with_both_only_loads_go_over_grpc() -> None:
    with CannedGrpc([b""]) as over_grpc, CannedHttp([http(b"[]"), http(b"")]) as over_http:
        both = RepositoryControl(http=address(over_http.port), grpc=address(over_grpc.port, "gRPC"))
        override = LoadOverride(config='{"backend": "python"}', files={"1/model.py": "pass"})
        assert both.index() == []
        assert both.load("m", 5, override) == ""
        both.unload("m")
        assert [method.rpartition("/")[2] for method in over_grpc.methods] == ["RepositoryModelLoad"]
