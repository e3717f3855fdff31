"""Whether a server responds, asked without waiting."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import grpc
import pytest
from canned import CannedGrpc
from running import free_ports

from graphkiln_backend.server import watchdog as module
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.watchdog import GrpcLivenessProbe, LivenessProbe


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(port: int) -> ListenAddress:
    return ListenAddress(protocol="HTTP", host="127.0.0.1", port=port)


def test_a_server_that_responds_is_not_silent(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        time.sleep(0.3)
        assert probe.silent_s() >= 0.3
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(4096).startswith(b"GET /v2/health/live HTTP/1.1\r\n")
            assert probe.silent_s() >= 0.3, "it waits for nothing"
            connection.sendall(b"HTTP/1.1 403 No\r\n\r\n")
            deadline = time.monotonic() + 10
            while probe.silent_s() >= 0.3:
                assert time.monotonic() < deadline


def test_a_server_that_accepts_and_does_not_respond_is_silent_for_ever(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        first = probe.silent_s()
        time.sleep(0.1)
        assert probe.silent_s() >= first + 0.1
        assert probe.silent_s() >= first + 0.1


def test_a_server_that_breaks_off_is_asked_again(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        probe.silent_s()
        listener.accept()[0].close()
        probe.silent_s()
        probe.silent_s()
        listener.settimeout(10)
        listener.accept()[0].close()


def test_a_port_that_nobody_listens_on_is_silent() -> None:
    (port,) = free_ports(1)
    with LivenessProbe(address(port)) as probe:
        time.sleep(0.05)
        assert probe.silent_s() >= 0.05
        assert probe.silent_s() >= 0.05


def test_the_time_in_which_nobody_asked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SUSPENDED_S", 0.1)
    (port,) = free_ports(1)
    with LivenessProbe(address(port)) as probe:
        time.sleep(0.3)
        assert probe.silent_s() < 0.3


class TestOverGrpc:
    def wait_for_answer(self, probe: GrpcLivenessProbe) -> None:
        time.sleep(0.3)
        deadline = time.monotonic() + 30
        while probe.silent_s() >= 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_server_that_responds_is_not_silent(self) -> None:
        with CannedGrpc([b""]) as server, GrpcLivenessProbe(address(server.port)) as probe:
            self.wait_for_answer(probe)
            self.wait_for_answer(probe)

    @pytest.mark.parametrize(
        "status", [(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted"), (grpc.StatusCode.INTERNAL, "no")]
    )
    def test_a_refusal_is_a_response(
        self, monkeypatch: pytest.MonkeyPatch, status: tuple[grpc.StatusCode, str]
    ) -> None:
        monkeypatch.setattr(CannedGrpc, "_answer", lambda _, __, context: context.abort(*status))
        with CannedGrpc([b""]) as server, GrpcLivenessProbe(address(server.port)) as probe:
            self.wait_for_answer(probe)

    def test_a_server_that_accepts_and_does_not_respond_is_silent(self, listener: socket.socket) -> None:
        with GrpcLivenessProbe(address(listener.getsockname()[1])) as probe:
            first = probe.silent_s()
            for _ in range(3):
                time.sleep(0.1)
                assert probe.silent_s() >= first + 0.1

    def test_so_is_a_port_that_nobody_listens_on(self) -> None:
        with GrpcLivenessProbe(address(free_ports(1)[0])) as probe:
            for _ in range(3):
                time.sleep(0.1)
                assert probe.silent_s() >= 0.1
