"""The listener that responds with 503 while a server restarts."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from running import free_ports

from graphkiln_backend.server import unavailable as module
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.unavailable import UnavailableListener


def http_address(host: str = "127.0.0.1") -> ListenAddress:
    return ListenAddress(protocol="HTTP", host=host, port=free_ports(1)[0])


@pytest.fixture
def address() -> Iterator[ListenAddress]:
    """Where a listener listens."""
    address = http_address()
    threads = threading.active_count()
    with UnavailableListener(address):
        yield address
    assert threading.active_count() <= threads + 1, "only a connection that was left open may still be there"


def request(address: ListenAddress, method: str = "GET", path: str = "/v2/health/ready", body: bytes | None = None):
    connection = http.client.HTTPConnection(*address.local_address, timeout=5)
    connection.request(method, path, body)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_every_method_gets_503_with_the_cause(address: ListenAddress, method: str) -> None:
    response, content = request(address, method)
    assert response.status == 503
    assert response.getheader("Content-Type") == "application/json"
    assert "the server restarts" in json.loads(content)["error"]


def test_what_is_no_http_does_not_end_it(address: ListenAddress, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(address.local_address, timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert connection.recv(4096)
    assert request(address)[0].status == 503
    assert capfd.readouterr().err == ""


def test_the_port_is_shared_with_a_server_that_shares_it(address: ListenAddress) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((address.host, address.port))
        server.listen()


def test_a_port_that_is_not_shared_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ListenAddress(protocol="HTTP", host="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            UnavailableListener(address)


def test_after_closing_nobody_listens() -> None:
    address = http_address()
    listener = UnavailableListener(address)
    assert request(address)[0].status == 503
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        request(address)


def test_a_client_that_sends_nothing_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 60)
    address = http_address()
    listener = UnavailableListener(address)
    with socket.create_connection(address.local_address):
        assert request(address)[0].status == 503
        begun = time.monotonic()
        listener.close()
        assert time.monotonic() - begun < 15


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    address = http_address("::1")
    with UnavailableListener(address):
        assert request(address)[0].status == 503


def test_who_reaches_it_while_it_closes_is_answered_or_refused_and_never_reset() -> None:
    address = http_address()
    outcomes: list[int | type[Exception]] = []

    def keep_asking() -> None:
        with suppress(OSError):
            while True:
                try:
                    outcomes.append(request(address)[0].status)
                except OSError as error:
                    outcomes.append(type(error))
                    raise

    for _ in range(3):
        asking = [threading.Thread(target=keep_asking) for _ in range(16)]
        with UnavailableListener(address):
            for thread in asking:
                thread.start()
            time.sleep(0.1)
        for thread in asking:
            thread.join(10)
    assert set(outcomes) == {503, ConnectionRefusedError}
