"""What gRPC clients are told when the server ends; the rest of a drain is tested with the supervisor."""

from __future__ import annotations

import socket
import time

from graphkiln_backend.server import drain as module


def test_grpc_clients_are_told_to_go_and_their_connections_are_closed_after_them() -> None:
    server, client = socket.socketpair()
    with client:
        client.sendall(b"a frame that nobody has read")
        client.shutdown(socket.SHUT_WR)
        module._say_goodbye([server])
        received = client.recv(100)
        assert received == bytes([0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        assert client.recv(100) == b""
        assert server.fileno() == -1


def test_a_client_that_does_not_go_is_not_waited_for_long() -> None:
    server, client = socket.socketpair()
    with client:
        begun = time.monotonic()
        module._say_goodbye([server])
        assert time.monotonic() - begun < 15
        assert client.recv(100) != b""


def test_a_client_that_is_gone() -> None:
    server, client = socket.socketpair()
    client.close()
    module._say_goodbye([server])
    assert server.fileno() == -1
