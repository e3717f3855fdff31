"""TLS in front of a plain port: the files, tritonserver's flags, and the process that ends the connections."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
from certificates import address, write
from running import free_ports

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.tls import TlsFiles, TlsTerminator, behind_tls

KNOWN = dict.fromkeys(
    ("http-port", "http-address", "grpc-use-ssl", "allow-http", "allow-grpc", "metrics-address"), True
)
BYTES = 3 << 20
CHUNK = 1 << 16


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> TlsFiles:
    """A certificate for 127.0.0.1."""
    return write(authority.issue_cert("127.0.0.1"), tmp_path)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a plain server that sends everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def exchange(port: int, context: ssl.SSLContext, data: bytes = b"hello") -> bytes:
    """What comes back of some bytes."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return b"".join(echoed(secure, data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def echoed(connection: ssl.SSLSocket, data: bytes) -> bytes:
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data) and (more := connection.recv(CHUNK)):
        answer += more
    return answer


def exchange_or_nothing(port: int, context: ssl.SSLContext) -> bytes:
    """With TLS 1.3 a client that is refused sees an alert or the end of the connection."""
    with suppress(OSError):
        return exchange(port, context)
    return b""


def trust(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class TestTerminator:
    def test_bytes_pass_both_ways(self, authority: trustme.CA, files: TlsFiles, echo: int) -> None:
        (port,) = free_ports(1)
        with TlsTerminator(files, address(port), address(echo)):
            assert exchange(port, trust(authority)) == b"hello"
            sent = os.urandom(BYTES)
            assert exchange(port, trust(authority), sent) == sent
            with pytest.raises(ssl.SSLCertVerificationError):
                exchange(port, trust(trustme.CA()))

    def test_an_expired_certificate(self, authority: trustme.CA, tmp_path: Path, echo: int) -> None:
        past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        pair = authority.issue_cert("127.0.0.1", not_before=past, not_after=past + datetime.timedelta(days=1))
        (port,) = free_ports(1)
        with (
            TlsTerminator(write(pair, tmp_path), address(port), address(echo)),
            pytest.raises(ssl.SSLCertVerificationError, match="expired"),
        ):
            exchange(port, trust(authority))

    def test_mutual(self, authority: trustme.CA, tmp_path: Path, echo: int) -> None:
        (port,) = free_ports(1)
        secured = write(authority.issue_cert("127.0.0.1"), tmp_path, authority)
        known, stranger = trust(authority), trust(authority)
        authority.issue_cert("someone@example.org").configure_cert(known)
        trustme.CA().issue_cert("stranger@example.org").configure_cert(stranger)
        with TlsTerminator(secured, address(port), address(echo)):
            assert exchange(port, known) == b"hello"
            for refused in (trust(authority), stranger):
                assert exchange_or_nothing(port, refused) == b""

    def test_a_process_that_dies_is_started_again(
        self, authority: trustme.CA, files: TlsFiles, echo: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        (port,) = free_ports(1)
        with TlsTerminator(files, address(port), address(echo)) as terminator:
            assert exchange(port, trust(authority)) == b"hello"
            os.kill(terminator.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while "starting it again" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            assert exchange(port, trust(authority)) == b"hello", "the listener has kept the client waiting"

    def test_a_server_that_does_not_run_ends_the_connection(self, authority: trustme.CA, files: TlsFiles) -> None:
        port, nobody = free_ports(2)
        with TlsTerminator(files, address(port), address(nobody)):
            assert exchange(port, trust(authority)) == b""


class TestFiles:
    @pytest.mark.parametrize("years", [-1, 1])
    def test_one_that_clients_refuse_is_told_at_the_start(
        self, years: int, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = datetime.datetime.now(datetime.UTC) + years * datetime.timedelta(days=365)
        begin = end - datetime.timedelta(days=500)
        files = write(authority.issue_cert("127.0.0.1", not_before=begin, not_after=end), tmp_path)
        assert TlsFiles.choose(files.certificate, files.key, None) == files
        assert [f"{files.certificate} expired on " in each for each in caplog.messages] == [True] * (years < 0)

    @pytest.mark.parametrize("given", [("c", None, None), (None, "k", None), (None, None, "a")])
    def test_some_are_missing(self, given: tuple[str | None, ...]) -> None:
        paths = [Path(name) if name else None for name in given]
        with pytest.raises(ServerSetupError, match="--tls-cert FILE --tls-key FILE"):
            TlsFiles.choose(paths[0], paths[1], paths[2])

    def test_they_are_tried(self, files: TlsFiles, tmp_path: Path) -> None:
        assert TlsFiles.choose(files.certificate, files.key, None) == files
        trustme.CA().issue_cert("x.org").private_key_pem.write_to_path(str(tmp_path / "other.pem"))
        with pytest.raises(ServerSetupError, match=r"other\.pem cannot be used"):
            TlsFiles.choose(files.certificate, tmp_path / "other.pem", None)
        with pytest.raises(ServerSetupError, match=r"--tls-client-ca .*missing\.pem"):
            TlsFiles.choose(files.certificate, files.key, tmp_path / "missing.pem")


class TestFlags:
    def parse(self, *arguments: str) -> TritonFlags:
        return TritonFlags.parse(arguments, KNOWN, "10.0.0.1")

    def test_http_moves_to_the_loopback_interface_and_metrics_stay(self, files: TlsFiles) -> None:
        inner = behind_tls(self.parse("--http-port=9000"), files)
        http, metrics = inner.listen_address("http"), inner.listen_address("metrics")
        assert http is not None
        assert metrics is not None
        assert http.host == "127.0.0.1"
        assert http.port != 9000
        assert metrics.host == "10.0.0.1"
        assert inner.arguments[0] == "--http-port=9000"
        assert f"--http-port={http.port}" in inner.arguments[1:], "the last one counts"

    def test_metrics_stay_on_an_address_of_ipv6(self, files: TlsFiles) -> None:
        inner = behind_tls(TritonFlags.parse([], KNOWN, "::"), files)
        assert "--metrics-address=ipv6:::" in inner.arguments, "as libevhtp wants it"

    def test_grpc_gets_tritons_own_tls(self, files: TlsFiles, authority: trustme.CA, tmp_path: Path) -> None:
        inner = behind_tls(self.parse(), files)
        assert "--grpc-use-ssl=true" in inner.arguments
        assert inner.values["grpc-use-ssl"] == "true"
        assert f"--grpc-server-key={files.key}" in inner.arguments
        assert not [each for each in inner.arguments if "mutual" in each]
        mutual = behind_tls(self.parse(), write(authority.issue_cert("x.org"), tmp_path, authority))
        assert "--grpc-use-ssl-mutual=true" in mutual.arguments
        assert f"--grpc-root-cert={tmp_path / 'ca.pem'}" in mutual.arguments

    @pytest.mark.parametrize("own", ["--grpc-use-ssl=false", "--allow-grpc=false"])
    def test_the_users_own_word_on_grpc_counts(self, files: TlsFiles, own: str) -> None:
        assert not [each for each in behind_tls(self.parse(own), files).arguments if "server-cert" in each]
