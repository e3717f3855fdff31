"""The errors of a connection, in the same words for every transport."""

from __future__ import annotations

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, ModelNotFound, ProtocolError
from graphkiln_backend.system.admin_key import HOW_TO_GIVE_IT, needs_admin_key
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint

# With TLS 1.3 all that a client sees of it is a connection that is closed.
_NO_CERTIFICATE = "a server with mutual TLS refuses clients without a certificate of theirs: client_cert=FILE"
_SECURED = {True: "with", False: "without"}

_WHAT_IS_SERVED = "graphkiln models, or client.models(), lists what is served"
# Since 26.04 Triton must be told to allow it. Source: Triton server, `kClientShmDisabledErrorStr`.
_NO_SHARED_MEMORY = "shared memory is disabled"
_ALLOW_SHARED_MEMORY = "start it with --allow-client-shm=true, as graphkiln serve does, or send arrays in the request"


def hint_for(kind: type[ClientError], reason: str) -> str:
    """Advice for an error, by the server's own reason; empty where the reason needs none."""
    if needs_admin_key(reason):
        return HOW_TO_GIVE_IT
    if _NO_SHARED_MEMORY in reason:
        return _ALLOW_SHARED_MEMORY
    return _WHAT_IS_SERVED if kind is ModelNotFound else ""


def deadline_exceeded(endpoint: Endpoint, deadline: Deadline, status: str | None = None) -> DeadlineExceeded:
    """The time for the whole call is over."""
    return DeadlineExceeded(f"no response from {endpoint} within {deadline.timeout_s:g} s", status=status)


def disconnected(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The connection ended before the response was complete."""
    return ConnectionFailed(f"{endpoint} closed the connection: {error}", hint=_hint(endpoint, ""))


def untrusted(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The server's certificate cannot be verified."""
    return ConnectionFailed(f"cannot trust {endpoint}: {error}", hint="check its certificate")


def tls_failed(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The TLS handshake failed."""
    hint = "is it an http:// server?" if "CERTIFICATE" not in str(error).upper() else _NO_CERTIFICATE
    return ConnectionFailed(f"TLS handshake with {endpoint} failed: {error}", hint=hint)


def unreachable(endpoint: Endpoint, reason: object, status: str | None = None) -> ConnectionFailed:
    """No server listens at the address, or there is no way to it."""
    hint = "is the server running? graphkiln health --url URL"
    if endpoint.scheme.startswith("grpc"):
        hint = f"is a server running there, and is it its gRPC port, {_SECURED[endpoint.is_secure]} TLS? Usually 8001"
    if "Socket closed" in str(reason):  # gRPC's word for a connection that ended right after it was made
        hint = _hint(endpoint, hint)
    return ConnectionFailed(f"cannot reach {endpoint}: {reason}", hint=hint, status=status)


def not_http(endpoint: Endpoint, error: Exception) -> ProtocolError:
    """The response is not HTTP."""
    return ProtocolError(f"{endpoint} does not speak HTTP: {error!r}", hint="is it the gRPC port? grpc://HOST:PORT")


def _hint(endpoint: Endpoint, otherwise: str) -> str:
    return _NO_CERTIFICATE if endpoint.is_secure and not endpoint.client_cert else otherwise
