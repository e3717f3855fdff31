"""Certificate files of `--tls-cert`, `--tls-key` and `--tls-client-ca`, used by the edge and the page."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

_log = logging.getLogger("graphkiln.server")


def fault_of_validity(pem: bytes, now: datetime) -> str:
    """Check the dates of a certificate; return the error of clients, or "" if valid or without `cryptography`.

    OpenSSL serves expired certificates without complaint.

    Args:
        pem: The server's certificate, optionally with its chain.
        now: Time with time zone.

    Raises:
        ValueError: The first certificate cannot be read.
    """
    if find_spec("cryptography") is None:  # the extras for serving install it
        return ""
    from cryptography import x509

    own = x509.load_pem_x509_certificates(pem)[0]
    if now < own.not_valid_before_utc:
        return f"is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return f"expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC" if now > own.not_valid_after_utc else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files of the TLS options.

    Attributes:
        certificate: The server's certificate with its chain.
        key: Its private key.
        client_authorities: Authorities of client certificates; None if clients need no certificate.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None

    @classmethod
    def choose(cls, certificate: Path | None, key: Path | None, client_authorities: Path | None) -> TlsFiles | None:
        """Check the files of `--tls-cert`, `--tls-key` and `--tls-client-ca`; return None if there are none.

        Raises:
            ServerSetupError: An option is missing, or a file is unusable.
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
        """Warn if clients will refuse the certificate because of its dates."""
        try:
            fault = fault_of_validity(self.certificate.read_bytes(), datetime.now(UTC))
        except ValueError as error:
            fault = f"cannot be examined: {error}"
        if fault:
            _log.warning("--tls-cert %s %s: clients that verify it do not connect; renew it", self.certificate, fault)

    def context(self) -> ssl.SSLContext:
        """SSL context of a server.

        Raises:
            ServerSetupError: A file cannot be read, or key and certificate do not match.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password, so that OpenSSL does not ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise _unusable(f"--tls-cert {self.certificate} and --tls-key {self.key}", error) from error
        if self.client_authorities:
            try:
                context.load_verify_locations(self.client_authorities)
            except (OSError, ssl.SSLError) as error:
                raise _unusable(f"--tls-client-ca {self.client_authorities}", error) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Stamp that changes with any of the files, which may be missing."""
        return tuple(_stamp(path) for path in (self.certificate, self.key, self.client_authorities) if path)

    def bundle(self) -> str:
        """Certificate and key in one text without empty lines, for HAProxy.

        Raises:
            OSError: A file cannot be read.
        """
        return _without_empty_lines(self.certificate.read_text(), self.key.read_text())

    def authorities(self) -> str:
        """Client authorities in one text; empty if there are none.

        Raises:
            OSError: The file cannot be read.
        """
        return _without_empty_lines(self.client_authorities.read_text()) if self.client_authorities else ""

    def words(self) -> tuple[str, str, str]:
        """The paths, as process arguments."""
        return str(self.certificate), str(self.key), str(self.client_authorities or "")


def _unusable(files: str, error: Exception) -> ServerSetupError:
    return ServerSetupError(f"{files} cannot be used: {error}", hint="PEM files, the key of this certificate")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _without_empty_lines(*texts: str) -> str:
    return "".join(f"{line}\n" for text in texts for line in text.splitlines() if line.strip())
