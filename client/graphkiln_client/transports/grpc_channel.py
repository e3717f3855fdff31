"""What the two gRPC transports share: how a channel is opened, and what its failures mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.admin_key import needs_admin_key
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports import limits as failures
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.grpc_wire import GrpcRequest, grpc_error
from graphkiln_client.transports.limits import infer_limit, too_large

PROBE_S = 1.0  # how long a server may take to tell that it is live

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # retries are the client's, under its deadline
    # By default a channel that could not connect refuses calls for a second, later for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Not what its name says: how long a connection may take. Source: subchannel.cc of gRPC, `min_connect_timeout`.
    ("grpc.min_reconnect_backoff_ms", 10_000),
]
# How grpcio says that it did not take a response, in the words that it has for overload, too.
_TOO_LARGE = "message larger than max"
_COMPRESSION = {
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


def open_channel(library: Any, endpoint: Endpoint, compression: Compression) -> Any:
    """Opens a channel, which connects at its first call.

    Args:
        library: `grpc` or `grpc.aio`.
        endpoint: Where to.
        compression: How requests are compressed.

    Raises:
        InvalidInput: The CA file or the client's certificate cannot be read.
    """
    limits = [("grpc.max_receive_message_length", infer_limit())]
    proxies = [("grpc.enable_http_proxy", 0)] if endpoint.is_local else []
    options: dict[str, Any] = {"options": [*_OPTIONS, *limits, *proxies]}
    if compression:
        options["compression"] = _COMPRESSION[compression]
    if not endpoint.is_secure:
        return library.insecure_channel(endpoint.authority, **options)
    endpoint.tls()  # says what is wrong with the files
    key, certificate = endpoint.client_key or endpoint.client_cert, endpoint.client_cert
    credentials = grpc.ssl_channel_credentials(_read(endpoint.ca_file), _read(key), _read(certificate))
    return library.secure_channel(endpoint.authority, credentials, **options)


def call_metadata(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """The endpoint's headers as gRPC sends them: names in lower case."""
    return _to_metadata(endpoint.headers)


def admin_metadata(endpoint: Endpoint, request: GrpcRequest) -> tuple[tuple[str, str], ...]:
    """The admin key, for a request that needs it."""
    return _to_metadata(endpoint.admin_headers()) if request.is_admin else ()


def may_be_unreachable(error: Any) -> bool:
    """Whether the server may be out of reach: gRPC has one status for that and for a server's "not now"."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not needs_admin_key(error.details() or "")


def translate_error(
    error: Any, endpoint: Endpoint, deadline: Deadline, request: GrpcRequest, *, reachable: bool
) -> ClientError:
    """A `grpc.RpcError` as one of the error tree.

    Args:
        error: The error.
        endpoint: The server.
        deadline: Of the call.
        request: What was sent.
        reachable: Whether the server was found to be live.
    """
    code, details = error.code(), error.details() or ""
    if not reachable:
        return failures.unreachable(endpoint, details, code.name)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return too_large(infer_limit())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return failures.deadline_exceeded(endpoint, deadline, code.name)
    return grpc_error(code, details, request.request_id)


def _to_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _read(file: Path | None) -> bytes | None:
    return read_bytes(file, MIB) if file else None
