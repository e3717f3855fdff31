"""How a service is reached: plainly, or with mutual TLS on both ports."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import trustme

from graphkiln_client.transports.endpoint import Security

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Certificates:
    """Files in PEM of an authority, a server and a client.

    Args:
        folder: Where they lie.
    """

    folder: Path

    @property
    def authority(self) -> Path:
        """Who signed both certificates."""
        return self.folder / "ca.pem"

    def of(self, who: str) -> tuple[Path, Path]:
        """Certificate and key of `server` or `client`."""
        return self.folder / f"{who}.pem", self.folder / f"{who}.key"

    @classmethod
    def issue(cls, folder: Path) -> Certificates:
        """Makes them anew."""
        folder.mkdir(mode=0o700)
        certificates = cls(folder)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(certificates.authority))
        for who, name in (("server", _HOST), ("client", "soak@localhost")):
            pair = authority.issue_cert(name)
            certificate, key = certificates.of(who)
            pair.cert_chain_pems[0].write_to_path(str(certificate))
            pair.private_key_pem.write_to_path(str(key))
        return certificates

    def flags(self) -> tuple[str, ...]:
        """Of `graphkiln serve`."""
        certificate, key = self.of("server")
        return (f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={self.authority}")

    @cached_property
    def context(self) -> ssl.SSLContext:
        """Of a client."""
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(*self.of("client"))
        return context


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Where a service listens.

    Attributes:
        http_port: For HTTP.
        grpc_port: For gRPC.
        certificates: For TLS; None where connections are plain.
    """

    http_port: int
    grpc_port: int
    certificates: Certificates | None = None

    @property
    def http_url(self) -> str:
        """Where it answers over HTTP."""
        return f"http{'s' if self.certificates else ''}://{_HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Where it answers over gRPC."""
        return f"grpc{'s' if self.certificates else ''}://{_HOST}:{self.grpc_port}"

    @property
    def security(self) -> Security:
        """For graphkiln's clients."""
        if self.certificates is None:
            return {}
        certificate, key = self.certificates.of("client")
        return {"ca_file": self.certificates.authority, "client_cert": certificate, "client_key": key}

    def connect_http(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is opened by its first request."""
        if self.certificates is None:
            return http.client.HTTPConnection(_HOST, self.http_port, timeout=timeout_s)
        context = self.certificates.context
        return http.client.HTTPSConnection(_HOST, self.http_port, timeout=timeout_s, context=context)

    def open_http(self, timeout_s: float) -> socket.socket:
        """A connection for bytes that need be no HTTP."""
        bare = socket.create_connection((_HOST, self.http_port), timeout=timeout_s)
        if self.certificates is None:
            return bare
        return self.certificates.context.wrap_socket(bare, server_hostname=_HOST)

    def triton_grpc(self) -> Mapping[str, Any]:
        """Arguments of Triton's own gRPC client."""
        address = {"url": f"{_HOST}:{self.grpc_port}"}
        if self.certificates is None:
            return address
        certificate, key = map(str, self.certificates.of("client"))
        files = {"root_certificates": str(self.certificates.authority), "private_key": key}
        return {**address, "ssl": True, **files, "certificate_chain": certificate}

    def triton_http(self) -> Mapping[str, Any]:
        """Arguments of Triton's own HTTP client."""
        address = {"url": f"{_HOST}:{self.http_port}"}
        if self.certificates is None:
            return address
        context = self.certificates.context
        return {**address, "ssl": True, "ssl_context_factory": lambda: context}
