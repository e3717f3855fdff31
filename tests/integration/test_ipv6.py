"""A server on `::` is reached over IPv6 on all ports, and by the image's health check."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest
from running import Server, StartServer

from graphkiln import Client
from graphkiln_backend.server.healthcheck import is_alive
from graphkiln_backend.server.ports import served_addresses


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6"),
]


def status(host: str, port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.fixture(scope="module")
def store(repository: Path) -> Path:
    return repository / "model_repository" / "digits"


def wait_ready(server: Server) -> None:
    server.wait_until(lambda: status("::1", server.http_port, "/v2/health/ready") == 200)


def test_every_port_over_both_families(start_server: StartServer, store: Path) -> None:
    server = start_server(store, "--host", "::")
    wait_ready(server)
    image = store.parents[1] / "docs" / "digits" / "seven.png"
    for host in ("::1", "127.0.0.1"):
        assert status(host, server.metrics_port, "/metrics") == 200
    addresses = (f"http://[::1]:{server.http_port}", server.url, f"grpc://[::1]:{server.grpc_port}", server.grpc_url)
    for url in addresses:
        with Client(url, timeout_s=30) as client:
            assert client.model("digits").classify(image).classifications[0].label == "seven"
    (address,) = served_addresses([server.temporary])
    assert is_alive(*address), "behind the edge"


def test_address_in_tritons_notation(start_server: StartServer, store: Path) -> None:
    server = start_server(store, "--http-address=ipv6:::1")
    wait_ready(server)
    assert status("127.0.0.1", server.http_port, "/v2/health/live") is None
