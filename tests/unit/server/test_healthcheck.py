"""The image's health check, against servers of each kind."""

from __future__ import annotations

import http.server
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import free_ports

from graphkiln_backend.server import ports as served_address
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.healthcheck import is_alive, main
from graphkiln_backend.server.ports import publish_address
from graphkiln_backend.system.owned_folder import OwnedFolder

KNOWN = {"http-port": True}


@contextmanager
def serving(status: int) -> Iterator[int]:
    """A server whose liveness is a status, and which is not ready; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v2/health/live" else 400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "alive"), [(200, True), (400, False), (503, False)])
def test_a_server_over_http(status: int, alive: bool) -> None:
    with serving(status) as port:
        assert is_alive("http", "127.0.0.1", port) is alive


def test_a_server_that_speaks_grpc_alone_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert is_alive("grpc", "127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_server(protocol: str) -> None:
    (port,) = free_ports(1)
    assert not is_alive(protocol, "127.0.0.1", port)


def test_the_server_that_runs_is_found_wherever_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(served_address, "OTHER_PARENTS", ())
    assert main() == 1
    with serving(200) as port, OwnedFolder() as run:
        publish_address(run.path, TritonFlags.parse([f"--http-port={port}"], KNOWN))
        assert main() == 0
    assert main() == 1
