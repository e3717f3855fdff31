"""Who may change the server: the endpoints that need a key, and what a request must carry to pass.

The user's own `--http-restricted-api` and `--grpc-restricted-protocol` win for the endpoints that they name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphkiln_backend.server.admin_key import AdminKey
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER

_log = logging.getLogger("graphkiln.server")

ADMIN_ENDPOINTS = ("model-repository", "shared-memory", "trace", "logging")
"""Triton's names of what changes the server. Loading runs code: a request may bring a model's files along."""
_HTTP_FLAG, _GRPC_FLAG = "http-restricted-api", "grpc-restricted-protocol"
_OTHER_SERVICES = ("sagemaker", "vertex-ai")
_OPEN = (
    "DANGER: whoever reaches %s may run any code on this machine, since %s need no key "
    "(leave out --admin-key-file off, or listen with --host 127.0.0.1)"
)
_OTHER = "DANGER: tritonserver's %s service listens on every address and knows no key"
_GRPC_PREFIX = GRPC_HEADER.removesuffix(HTTP_HEADER)


@dataclass(frozen=True, slots=True)
class Access:
    """How the server's own endpoints are restricted.

    Attributes:
        arguments: For tritonserver, beside the user's own; they hold the key.
        http_headers: What a request of ours must carry to reach every restricted endpoint over HTTP.
        grpc_metadata: The same for gRPC.
        open_endpoints: Endpoints that change the server and need no key, as `HTTP model-repository`.
    """

    arguments: tuple[str, ...] = field(default=(), repr=False)
    http_headers: dict[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    open_endpoints: tuple[str, ...] = ()

    @classmethod
    def plan(cls, flags: TritonFlags, key: AdminKey | None) -> Access:
        """Restricts what the user has not restricted otherwise.

        Args:
            flags: The user's flags.
            key: The key, or None for a server that is open on purpose.
        """
        http_users, http_own = _read_restrictions(flags.repeated_values.get(_HTTP_FLAG, ()))
        grpc_users, grpc_own = _read_restrictions(flags.repeated_values.get(_GRPC_FLAG, ()))
        http_left = [name for name in ADMIN_ENDPOINTS if name not in http_users]
        grpc_left = [name for name in ADMIN_ENDPOINTS if name not in grpc_users]
        if key is None:
            unguarded = (*(f"HTTP {name}" for name in http_left), *(f"gRPC {name}" for name in grpc_left))
            return cls((), http_own, _prefix(grpc_own), unguarded)
        return cls(
            (*_restrict(_HTTP_FLAG, http_left, key), *_restrict(_GRPC_FLAG, grpc_left, key)),
            {HTTP_HEADER: key.value, **http_own},
            _prefix({HTTP_HEADER: key.value, **grpc_own}),
        )

    def warn_if_open(self, flags: TritonFlags) -> None:
        """Says it loudly where anybody on the network may change the server."""
        public = [f"{address.host}:{address.port}" for address in flags.listen_addresses() if address.is_public]
        if self.open_endpoints and public:
            _log.error(_OPEN, ", ".join(public), ", ".join(self.open_endpoints))
        for service in _OTHER_SERVICES:
            if flags.is_on(service, default="false"):
                _log.error(_OTHER, service)


def _restrict(flag: str, endpoints: Sequence[str], key: AdminKey) -> list[str]:
    return [f"--{flag}={','.join(endpoints)}:{HTTP_HEADER}={key.value}"] if endpoints else []


def _read_restrictions(values: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """The endpoints that a user's flags name, and the headers that they then need."""
    endpoints: set[str] = set()
    headers: dict[str, str] = {}
    for value in values:
        names, _, header = value.partition(":")
        endpoints.update(name.strip() for name in names.split(","))
        name, _, text = header.partition("=")
        headers[name] = text
    return endpoints, headers


def _prefix(headers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{_GRPC_PREFIX}{name}".lower(), value) for name, value in headers.items())
