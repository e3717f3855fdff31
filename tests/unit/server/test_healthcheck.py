"""The image's health check, against servers of each kind."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from certificates import address, write
from running import free_ports

from graphkiln_backend.server.healthcheck import is_healthy
from graphkiln_backend.server.tls import TlsTerminator


@contextmanager
def serving(status: int, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that responds with a status to whatever it is asked; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A handshake that fails."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def tls(folder: Path) -> ssl.SSLContext:
    files = write(trustme.CA().issue_cert("127.0.0.1"), folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    return context


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (400, False), (503, False)])
def test_without_tls_and_with_it(tmp_path: Path, status: int, healthy: bool) -> None:
    for context in (None, tls(tmp_path)):
        with serving(status, context) as port:
            assert is_healthy(port=port) is healthy


def test_a_server_that_asks_for_a_certificate_lives(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = write(authority.issue_cert("127.0.0.1"), tmp_path, authority)
    port, inner = free_ports(2)
    with TlsTerminator(files, address(port), address(inner)):
        assert is_healthy(port=port)
    assert not is_healthy(port=port)


def test_nobody() -> None:
    (port,) = free_ports(1)
    assert not is_healthy(port=port)
