"""TLS for both protocols from one certificate: `--tls-cert`, `--tls-key` and, for mutual TLS, `--tls-client-ca`.

Triton (24.10) has TLS for gRPC only. For HTTP a child process ends the TLS connections (`server.tls_terminator`) and
passes their bytes on to tritonserver, which then listens on a port of the loopback interface that is not published.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.flags import DEFAULT_HOST, ListenAddress, TritonFlags, free_port, spelled_for
from graphkiln_backend.server.listening_child import ListeningChild

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

_log = logging.getLogger("graphkiln.server")

# When a certificate is valid. OpenSSL serves an expired one like any other, and only clients complain.


def fault_of_validity(pem: bytes, now: datetime) -> str:
    """The reason for which clients refuse a certificate at a moment; empty without one, or without `cryptography`.

    Args:
        pem: The server's own certificate, and what may follow it.
        now: With its time zone.

    Raises:
        ValueError: The first certificate cannot be read.
    """
    if find_spec("cryptography") is None:  # the extras that serve bring it
        return ""
    from cryptography import x509

    own = x509.load_pem_x509_certificates(pem)[0]
    if now < own.not_valid_before_utc:
        return f"is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return f"expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC" if now > own.not_valid_after_utc else ""


_REFUSED = "--tls-cert %s %s: clients that check it do not connect; renew it, then start again"


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """The files that the options name, in PEM.

    Attributes:
        certificate: The server's certificate, and those that lead to its authority.
        key: Its private key.
        client_authorities: Who must have signed a client's certificate; None where clients need none.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None

    @classmethod
    def choose(cls, certificate: Path | None, key: Path | None, client_authorities: Path | None) -> TlsFiles | None:
        """The files of the options `--tls-cert`, `--tls-key` and `--tls-client-ca`, which are tried; None without any.

        Raises:
            ServerSetupError: Some are missing, or they cannot be used.
        """
        if not (certificate or key or client_authorities):
            return None
        if not (certificate and key):
            raise ServerSetupError("TLS needs a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
        files = cls(certificate=certificate, key=key, client_authorities=client_authorities)
        files.context()
        files.warn_if_refused()
        return files

    def warn_if_refused(self) -> None:
        """Warn where clients will refuse the certificate because of its time."""
        try:
            fault = fault_of_validity(self.certificate.read_bytes(), datetime.now(UTC))
        except ValueError as error:
            fault = f"cannot be examined: {error}"
        if fault:
            _log.warning(_REFUSED, self.certificate, fault)

    def context(self) -> ssl.SSLContext:
        """The settings of a server.

        Raises:
            ServerSetupError: A file cannot be read, or the key belongs to another certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise _unusable(f"--tls-cert {self.certificate} and --tls-key {self.key}", error) from error
        if self.client_authorities:
            _require_client_certificates(context, self.client_authorities)
        return context

    def words(self) -> tuple[str, str, str]:
        """The files as arguments of a process; `of_words` is the inverse."""
        return str(self.certificate), str(self.key), str(self.client_authorities or "")

    @classmethod
    def of_words(cls, certificate: str, key: str, authorities: str) -> TlsFiles:
        """The files that `words` named."""
        return cls(
            certificate=Path(certificate),
            key=Path(key),
            client_authorities=Path(authorities) if authorities else None,
        )

    def grpc_arguments(self) -> Iterator[str]:
        """Flags of tritonserver itself, for gRPC."""
        yield "--grpc-use-ssl=true"
        yield f"--grpc-server-cert={self.certificate.absolute()}"
        yield f"--grpc-server-key={self.key.absolute()}"
        if self.client_authorities:
            yield "--grpc-use-ssl-mutual=true"
            yield f"--grpc-root-cert={self.client_authorities.absolute()}"


class TlsTerminator(ListeningChild):
    """Listen for HTTPS and pass the bytes on; its child process is started again when it ends.

    Raises:
        ServerSetupError: The address is in use.
    """

    def __init__(self, files: TlsFiles, public: ListenAddress, private: ListenAddress) -> None:
        module, address = "graphkiln_backend.server.tls_terminator", dataclasses.replace(public, protocol="HTTPS")
        super().__init__("TLS", module, (str(private.port), *files.words()), address)


def behind_tls(flags: TritonFlags, files: TlsFiles) -> TritonFlags:
    """The flags of a tritonserver behind TLS: HTTP on a free port of the loopback interface, gRPC with its own TLS."""
    moved = _moved_http(flags) if flags.listen_address("http") else {}
    own = () if "grpc-use-ssl" in flags.values or not flags.is_on("grpc") else tuple(files.grpc_arguments())
    arguments = (*flags.arguments, *(f"--{name}={value}" for name, value in moved.items()), *own)
    secured = {"grpc-use-ssl": "true"} if own else {}  # the server's own requests then go over HTTP
    return dataclasses.replace(flags, arguments=arguments, values={**flags.values, **moved, **secured})


def open_terminator(files: TlsFiles | None, flags: TritonFlags, inner: TritonFlags) -> AbstractContextManager[object]:
    """Listen for HTTPS where there are certificates and HTTP is on.

    Raises:
        ServerSetupError: The address is in use.
    """
    public, private = flags.listen_address("http"), inner.listen_address("http")
    return TlsTerminator(files, public, private) if files and public and private else nullcontext()


def _moved_http(flags: TritonFlags) -> dict[str, str]:
    metrics = flags.listen_address("metrics")
    kept = {"metrics-address": spelled_for("metrics", metrics.host)} if metrics else {}
    return {"http-address": DEFAULT_HOST, "http-port": str(free_port()), **kept}


def _require_client_certificates(context: ssl.SSLContext, authorities: Path) -> None:
    try:
        context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(f"--tls-client-ca {authorities}", error) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _unusable(files: str, error: Exception) -> ServerSetupError:
    return ServerSetupError(f"{files} cannot be used: {error}", hint="PEM files, the key of this certificate")


def _no_password() -> str:
    """Answer in place of OpenSSL's question on the terminal."""
    return ""
