"""The errors of a connection, in the same words for every transport: a table of what can go wrong on the way."""

from __future__ import annotations

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, ProtocolError
from graphkiln_client.deadline import Deadline
from graphkiln_client.transports.endpoint import Endpoint


def deadline_exceeded(endpoint: Endpoint, deadline: Deadline, status: str | None = None) -> DeadlineExceeded:
    """The time for the whole call is over."""
    return DeadlineExceeded(f"no response from {endpoint} within {deadline.timeout_s:g} s", status=status)


def disconnected(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The connection ended before the response was complete."""
    return ConnectionFailed(f"{endpoint} closed the connection: {error}")


def untrusted(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The server's certificate cannot be verified."""
    return ConnectionFailed(f"cannot trust {endpoint}: {error}", hint="check its certificate")


def tls_failed(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    """The TLS handshake failed."""
    return ConnectionFailed(f"TLS handshake with {endpoint} failed: {error}", hint="is it an http:// server?")


def unreachable(endpoint: Endpoint, reason: object, status: str | None = None) -> ConnectionFailed:
    """No server listens at the address, or there is no way to it."""
    hint = "is the server running? graphkiln health --url URL"
    return ConnectionFailed(f"cannot reach {endpoint}: {reason}", hint=hint, status=status)


def not_http(endpoint: Endpoint, error: Exception) -> ProtocolError:
    """What the server sent is not HTTP."""
    return ProtocolError(f"{endpoint} does not speak HTTP: {error!r}")
