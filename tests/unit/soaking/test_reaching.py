"""How a service is reached, plainly and with TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

from graphkiln_backend.server.tls import TlsFiles
from soaking.service import Certificates, Reach


def test_plain_connections_need_nothing() -> None:
    reach = Reach(http_port=1, grpc_port=2)
    assert (reach.http_url, reach.grpc_url) == ("http://127.0.0.1:1", "grpc://127.0.0.1:2")
    assert reach.security == {}
    assert reach.triton_http() == {"url": "127.0.0.1:1"}
    assert reach.triton_grpc() == {"url": "127.0.0.1:2"}


def test_with_certificates_both_sides_know_each_other(tmp_path: Path) -> None:
    certificates = Certificates.issue(tmp_path / "pki")
    files = TlsFiles(
        certificate=certificates.of("server")[0],
        key=certificates.of("server")[1],
        client_authorities=certificates.authority,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reach = Reach(http_port=port, grpc_port=port, certificates=certificates)
        assert reach.http_url == f"https://127.0.0.1:{port}"
        names: list[object] = []

        def serve() -> None:
            with listener.accept()[0] as bare, files.context().wrap_socket(bare, server_side=True) as secured:
                names.append(secured.getpeercert())
                secured.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        with reach.open_http(10) as connection:
            assert isinstance(connection, ssl.SSLSocket)
            assert connection.recv(9) == b"hello"
        thread.join()
    assert names[0]
