"""Address and security of a connection, and its errors."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypedDict
from urllib.parse import SplitResult, quote, unquote, urlsplit

from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ProtocolError,
)
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.admin_key import (
    GRPC_HEADER,
    HOW_TO_GIVE_IT,
    HTTP_HEADER,
    check_key,
    find_key,
    is_local,
    needs_admin_key,
)
from graphkiln_client.transports.base import Deadline

Compression = Literal["", "gzip", "deflate"]

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
_HINT = "use http://HOST:PORT, https://HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
# Characters of a path that are not quoted. Source: RFC 3986, `pchar`.
_PATH_SIGNS = "/%:@!$&'()*+,;=~"
_SECRET_PART = re.compile(r"[?#]")
# With TLS 1.3, a server that requires a client certificate just closes the connection.
_NO_CERTIFICATE = "a server with mutual TLS requires a client certificate: client_cert=FILE"
_LIST_MODELS = "graphkiln models or client.models() lists the models of the server"
# Disabled by default since Triton 26.04. Source: Triton server, `kClientShmDisabledErrorStr`.
_NO_SHARED_MEMORY = "shared memory is disabled"
_ALLOW_SHARED_MEMORY = "start the server with --allow-client-shm=true, or send the tensors in the request"


class Security(TypedDict, total=False):
    """Security options of the clients.

    Attributes:
        headers: Headers of every call, for example `{"Authorization": "Bearer ..."}`; never logged.
        ca_file: Certificate authorities to trust instead of the system's.
        client_cert: Client certificate for mutual TLS.
        client_key: Private key of the client certificate; None if it is in the same file.
        admin_key: Key for calls that change the server; not needed for the user's own server on this machine.
    """

    headers: Mapping[str, str] | None
    ca_file: str | Path | None
    client_cert: str | Path | None
    client_key: str | Path | None
    admin_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and security options of a server. `str` and `repr` contain no secrets.

    Attributes:
        scheme: `http`, `https`, `grpc` or `grpcs`.
        host: Host name in ASCII, or IP address (IPv6 without brackets).
        path: Path prefix for a server behind a gateway, quoted, without a trailing slash.
        headers: Headers of every call; may contain credentials.
        ca_file: Certificate authorities to trust instead of the system's.
        client_key: Private key of the client certificate; None if it is in the same file.
        admin_key: Admin key; if empty, it is taken from the environment or from a local server's key file.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    admin_key: str = field(default="", repr=False)

    @classmethod
    def parse(
        cls,
        url: str,
        headers: Mapping[str, str] | None = None,
        ca_file: str | Path | None = None,
        *,
        client_cert: str | Path | None = None,
        client_key: str | Path | None = None,
        admin_key: str = "",
    ) -> Self:
        """Parse a URL; `user:password@` becomes a header.

        Raises:
            InvalidInput: The URL, a header or the admin key is invalid, or `client_key` lacks its certificate.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
            host, path = _to_ascii(parts)
        except ValueError as error:
            raise InvalidInput(f"'{_without_credentials(text)}' is not a URL: {error}", hint=_HINT) from error
        if parts.scheme not in _PORTS or not host or port == 0:
            raise InvalidInput(f"unsupported URL '{_without_credentials(text)}'", hint=_HINT)
        if path and parts.scheme.startswith("grpc"):
            raise InvalidInput(f"gRPC URLs have no path, got '{_without_credentials(text)}'", hint=_HINT)
        if parts.query or parts.fragment:  # not shown, because they may contain a token
            raise InvalidInput("a server URL must not contain '?' or '#'", hint=_HINT)
        sent = _check_headers(headers or {})
        if client_key and not client_cert:
            raise InvalidInput("client_key requires client_cert", hint="client_cert=FILE")
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            sent = {"Authorization": f"Basic {base64.b64encode(secret).decode()}", **sent}
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or _PORTS[parts.scheme],
            path=path,
            headers=sent,
            ca_file=_path(ca_file),
            client_cert=_path(client_cert),
            client_key=_path(client_key),
            admin_key=check_key(admin_key, "admin_key") if admin_key else "",
        )

    @property
    def is_secure(self) -> bool:
        """True if the connection is encrypted."""
        return self.scheme in ("https", "grpcs")

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine, so that proxies from the environment are ignored.

        Source: Go's net/http, `ProxyFromEnvironment`.
        """
        return is_local(self.host) or self.host in ("0.0.0.0", "::")  # noqa: S104 - not for listening

    @property
    def authority(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def tls(self) -> ssl.SSLContext | None:
        """Create the TLS context; None for a plain connection.

        Raises:
            InvalidInput: The CA file or the client certificate cannot be read.
        """
        if not self.is_secure:
            return None
        try:
            if self.ca_file:
                read_bytes(self.ca_file, MIB)  # rejects pipes, for which OpenSSL would wait
            context = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"cannot read certificate authorities from {self.ca_file}: {error}") from error
        if self.client_cert:
            try:
                # An empty password prevents OpenSSL from prompting on the terminal.
                context.load_cert_chain(self.client_cert, self.client_key, password=lambda: "")
            except (OSError, ssl.SSLError) as error:
                files = f"{self.client_cert} and {self.client_key}" if self.client_key else f"{self.client_cert}"
                raise InvalidInput(f"cannot read the client certificate and key from {files}: {error}") from error
        return context

    def admin_headers(self) -> dict[str, str]:
        """Return the headers of calls that change the server; empty if no admin key is found.

        Raises:
            InvalidInput: The key file in the environment variable is invalid.
        """
        name = HTTP_HEADER if self.scheme.startswith("http") else GRPC_HEADER
        key = self.admin_key or find_key(self.host, self.port)
        return {name: key} if key else {}


def _to_ascii(parts: SplitResult) -> tuple[str, str]:
    """Return the host in ASCII and the quoted path; raise ValueError for an invalid host."""
    host = (parts.hostname or "").encode("idna").decode()
    return host, quote(parts.path.rstrip("/"), safe=_PATH_SIGNS)


def _path(file: str | Path | None) -> Path | None:
    return Path(file) if file else None


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        # Values are not shown, because they may be secrets.
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidInput(f"{name!r} is not a valid header name")
        if not value.isascii() or not value.isprintable():
            raise InvalidInput(f"header {name} contains characters that cannot be sent")
    return dict(headers)


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{_SECRET_PART.split(rest.rpartition('@')[2])[0]}"


def hint_for(kind: type[ClientError], reason: str) -> str:
    """Return advice for an error response; empty if there is none."""
    if needs_admin_key(reason):
        return HOW_TO_GIVE_IT
    if _NO_SHARED_MEMORY in reason:
        return _ALLOW_SHARED_MEMORY
    return _LIST_MODELS if kind is ModelNotFound else ""


def deadline_exceeded(endpoint: Endpoint, deadline: Deadline, status: str | None = None) -> DeadlineExceeded:
    """Create the error for a call that exceeded its deadline."""
    return DeadlineExceeded(f"no response from {endpoint} within {deadline.timeout_s:g} s", status=status)


def disconnected(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """Create the error for a connection that closed before the response was complete."""
    return ConnectionFailed(f"{endpoint} closed the connection: {error}", hint=_hint(endpoint, ""))


def untrusted(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """Create the error for a server certificate that cannot be verified."""
    return ConnectionFailed(f"cannot trust {endpoint}: {error}", hint="check its certificate")


def tls_failed(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """Create the error for a failed TLS handshake."""
    hint = (
        "check that the server uses TLS (not http://)" if "CERTIFICATE" not in str(error).upper() else _NO_CERTIFICATE
    )
    return ConnectionFailed(f"TLS handshake with {endpoint} failed: {error}", hint=hint)


def unreachable(endpoint: Endpoint, reason: object, status: str | None = None) -> ConnectionFailed:
    """Create the error for a server to which no connection can be made."""
    hint = "check that the server is running: graphkiln health --url URL"
    if endpoint.scheme.startswith("grpc"):
        hint = "check that a server is running and that this is its gRPC port, usually 8001, "
        hint += "with TLS" if endpoint.is_secure else "without TLS"
    if "Socket closed" in str(reason):  # gRPC: the connection was closed right after it was established
        hint = _hint(endpoint, hint)
    return ConnectionFailed(f"cannot reach {endpoint}: {reason}", hint=hint, status=status)


def not_http(endpoint: Endpoint, error: Exception) -> ProtocolError:
    """Create the error for a response that is not HTTP."""
    return ProtocolError(f"{endpoint} does not speak HTTP: {error!r}", hint="for a gRPC port, use grpc://HOST:PORT")


def _hint(endpoint: Endpoint, otherwise: str) -> str:
    return _NO_CERTIFICATE if endpoint.is_secure and not endpoint.client_cert else otherwise
