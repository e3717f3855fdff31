"""The address of a server, and the security of a connection to it."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypedDict
from urllib.parse import SplitResult, quote, unquote, urlsplit

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER, check_key, find_key, is_local

Compression = Literal["", "gzip", "deflate"]

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
_HINT = "use http://HOST:PORT, https://HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
# What a path may hold beside letters, digits, '-', '.' and '_'. Source: RFC 3986, `pchar`.
_PATH_SIGNS = "/%:@!$&'()*+,;=~"
_SECRET_PART = re.compile(r"[?#]")


class Security(TypedDict, total=False):
    """Security options of a connection, as the clients take them.

    Attributes:
        headers: Sent with every call, for example `{"Authorization": "Bearer ..."}`; never shown.
        ca_file: Certificate authorities to trust in place of the system's.
        client_cert: The client's certificate, for a server that asks for one (mutual TLS).
        client_key: Its private key; left out where the certificate's file holds it, too.
        admin_key: For what changes the server; left out for a server of the same user on this machine.
    """

    headers: Mapping[str, str] | None
    ca_file: str | Path | None
    client_cert: str | Path | None
    client_key: str | Path | None
    admin_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A server's address, with what must not be shown kept out of `str` and `repr`.

    Attributes:
        scheme: `http`, `https`, `grpc` or `grpcs`.
        host: Name, in ASCII, or address, IPv6 without brackets.
        port: TCP port.
        path: Path before the protocol's own paths, quoted, for a server behind a gateway; without a slash at its end.
        headers: Sent with every call; they may hold credentials.
        ca_file: Certificate authorities to trust in place of the system's.
        client_cert: The client's own certificate, or None.
        client_key: Its private key; None where the certificate's file holds it, too.
        admin_key: For what changes the server; empty: of the environment, or of a server on this machine.
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
        """Read a URL; `user:password@` in it becomes a header.

        Raises:
            InvalidInput: The URL, a header or the admin key cannot be used, or there is a private key alone.
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
            raise InvalidInput(f"gRPC has no paths, got '{_without_credentials(text)}'", hint=_HINT)
        if parts.query or parts.fragment:  # which may hold a token, and are not shown
            raise InvalidInput("what follows '?' or '#' in the URL of a server would not be sent", hint=_HINT)
        sent = _check_headers(headers or {})
        if client_key and not client_cert:
            raise InvalidInput("a client_key is of no use without its client_cert", hint="client_cert=FILE")
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
        """True if it is on this machine: no proxy is asked for it, even if the environment names one.

        Source: Go's net/http, `ProxyFromEnvironment`.
        """
        return is_local(self.host) or self.host in ("0.0.0.0", "::")  # noqa: S104 - asked, not listened at

    @property
    def authority(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None for a plain connection.

        Raises:
            InvalidInput: The CA file or the client's certificate cannot be read.
        """
        if not self.is_secure:
            return None
        context = self._trust()
        if self.client_cert:
            _load_certificate(context, self.client_cert, self.client_key)
        return context

    def admin_headers(self) -> dict[str, str]:
        """Headers of a call that changes the server: its admin key; none where none is known.

        Raises:
            InvalidInput: The environment names a file that holds no key.
        """
        name = HTTP_HEADER if self.scheme.startswith("http") else GRPC_HEADER
        key = self.admin_key or find_key(self.host, self.port)
        return {name: key} if key else {}

    def _trust(self) -> ssl.SSLContext:
        try:
            if self.ca_file:
                read_bytes(self.ca_file, MIB)  # OpenSSL would wait for a pipe
            return ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"cannot read certificate authorities from {self.ca_file}: {error}") from error


def _to_ascii(parts: SplitResult) -> tuple[str, str]:
    """Host and path as they are sent; ValueError where the host is no name."""
    host = (parts.hostname or "").encode("idna").decode()
    return host, quote(parts.path.rstrip("/"), safe=_PATH_SIGNS)


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        files = f"{certificate} and {key}" if key else f"{certificate}"
        raise InvalidInput(f"cannot read the client's certificate and key from {files}: {error}") from error


def _no_password() -> str:
    """In place of OpenSSL's question on the terminal."""
    return ""


def _path(file: str | Path | None) -> Path | None:
    return Path(file) if file else None


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        # The value is not shown: it may be a password.
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidInput(f"{name!r} is not a valid header name")
        if not value.isascii() or not value.isprintable():
            raise InvalidInput(f"header {name} holds characters that cannot be sent")
    return dict(headers)


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{_SECRET_PART.split(rest.rpartition('@')[2])[0]}"
