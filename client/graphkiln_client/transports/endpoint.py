"""Where a server is, and how a connection to it is secured: what every transport is made from."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes

Compression = Literal["", "gzip", "deflate"]

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
_HINT = "use http://HOST:PORT, https://HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A server's address, with what must not be shown kept out of `str` and `repr`.

    Attributes:
        scheme: `http`, `https`, `grpc` or `grpcs`.
        host: Name or address, IPv6 without brackets.
        port: TCP port.
        path: Path before the protocol's own paths, for a server behind a gateway; without a slash at its end.
        headers: Sent with every call; they may hold credentials.
        ca_file: Certificate authorities to trust in place of the system's.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str], ca_file: Path | None) -> Self:
        """Reads a URL; `user:password@` in it becomes a header.

        Raises:
            InvalidInput: The URL or a header cannot be used.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InvalidInput(f"'{_without_credentials(text)}' is not a URL: {error}", hint=_HINT) from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidInput(f"unsupported URL '{_without_credentials(text)}'", hint=_HINT)
        sent = _check_headers(headers)
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            sent = {"Authorization": f"Basic {base64.b64encode(secret).decode()}", **sent}
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            path=parts.path.rstrip("/"),
            headers=sent,
            ca_file=ca_file,
        )

    @property
    def is_secure(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("https", "grpcs")

    @property
    def authority(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None for a plain connection.

        Raises:
            InvalidInput: The CA file cannot be read.
        """
        if not self.is_secure:
            return None
        try:
            if self.ca_file:
                read_bytes(self.ca_file, MIB)  # OpenSSL would wait for a pipe
            return ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"cannot read certificate authorities from {self.ca_file}: {error}") from error


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
    return f"{scheme}://{rest.rpartition('@')[2]}"
