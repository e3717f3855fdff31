"""Another process's connections: seen, paused, and kept open when it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from waiting import wait_until

from graphkiln_backend.server import connections as module
from graphkiln_backend.server.connections import HeldConnection, HeldConnections

ECHO = """
import select, socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connections = {}
poll = select.poll()
poll.register(listener, select.POLLIN)
while True:
    for descriptor, _ in poll.poll():
        if descriptor == listener.fileno():
            connection = listener.accept()[0]
            connections[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
        elif received := connections[descriptor].recv(100):
            if received != b"wait":
                connections[descriptor].sendall(received)
        else:
            poll.unregister(descriptor)
            connections.pop(descriptor).close()
"""


@dataclass
class Echo:
    process: subprocess.Popen[str]
    port: int
    held: HeldConnections


@pytest.fixture
def echo() -> Iterator[Echo]:
    """A process that sends back what it gets, except `wait`."""
    with subprocess.Popen([sys.executable, "-SE", "-c", ECHO], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with HeldConnections(process.pid, {port}) as held:
            yield Echo(process, port, held)
        process.kill()


def connect(echo: Echo) -> tuple[socket.socket, HeldConnection]:
    client = socket.create_connection(("127.0.0.1", echo.port), timeout=20)
    wait_until(lambda: len(echo.held.refresh()) == 1)
    (held,) = echo.held.refresh()
    assert held.port == echo.port
    return client, held


def test_what_is_under_way_is_seen(echo: Echo) -> None:
    client, held = connect(echo)
    with client:
        assert not held.traffic.under_way
        client.sendall(b"wait")
        wait_until(lambda: held.traffic.consumed == 4)
        assert held.traffic.under_way
        time.sleep(0.05)
        client.sendall(b"answer")
        assert client.recv(100) == b"answer"
        wait_until(lambda: held.traffic.sent == 6)
        assert not held.traffic.under_way


def test_a_paused_connection_is_not_read_and_outlives_the_server(echo: Echo) -> None:
    client, held = connect(echo)
    with client:
        client.sendall(b"one")
        assert client.recv(100) == b"one"
        assert held.pause()
        client.sendall(b"two")
        wait_until(lambda: held.traffic.unread == 3)
        time.sleep(0.1)
        assert held.traffic.consumed == 3
        echo.process.kill()
        echo.process.wait()
        with held.release() as mine:
            held.close()
            assert mine.recv(100) == b"two"
            mine.sendall(b"from me")
            assert client.recv(100) == b"from me"


def test_what_the_server_closes_is_let_go(echo: Echo) -> None:
    client, _ = connect(echo)
    client.shutdown(socket.SHUT_WR)
    wait_until(lambda: echo.held.refresh() == [])
    with client:
        assert client.recv(100) == b"", "the duplicate must not keep it open"


def test_a_connection_that_was_answered_in_the_moment_of_its_last_request_is_doubtful_until_more_is_sent(
    echo: Echo,
) -> None:
    client, held = connect(echo)
    with client:
        client.sendall(b"one")
        assert client.recv(100) == b"one"
        seen = held.traffic
        before = module.Traffic(
            sent=seen.sent, sent_ago_s=1.0, received_ago_s=1.0, consumed=seen.consumed, unread=seen.unread
        )
        held.paused = before
        assert held.doubtful
        client.sendall(b"two")
        assert client.recv(100) == b"two"
        assert not held.doubtful


def test_no_more_are_held_than_there_are_descriptors_for(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_allow_descriptors", lambda: module._OWN_DESCRIPTORS + 1)
    with (
        HeldConnections(echo.process.pid, {echo.port}) as held,
        socket.create_connection(("127.0.0.1", echo.port)),
        socket.create_connection(("127.0.0.1", echo.port)),
    ):
        wait_until(lambda: len(echo.held.refresh()) == 2)
        assert len(held.refresh()) == 1


def test_where_the_kernel_does_not_allow_it(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIDFD_GETFD", 100_000)
    with pytest.raises(OSError, match="not implemented"):
        HeldConnections(echo.process.pid, {echo.port})
