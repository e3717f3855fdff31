"""Ports that the server would listen on: free, or held by a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from graphkiln.doctor.finding import Finding, Request, graded, refused

if TYPE_CHECKING:
    from graphkiln_backend.server.flags import ListenAddress, TritonFlags

SERVICES = ("http", "grpc", "metrics")


def check_ports(request: Request) -> Iterator[Finding]:
    """Each port."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import check_distinct, check_free

    taken: list[ListenAddress] = []
    flags = _read_flags(request)
    for service in SERVICES:
        try:
            address = flags.listen_address(service)
        except ServerSetupError as error:
            yield refused(service, error)
            continue
        if address is None:
            yield Finding(subject=service, message="switched off")
            continue
        message, hint, holder = "free", "", ""
        try:
            check_distinct(service, address, taken)
            check_free(service, address)
        except ServerSetupError as error:
            holder = find_holder(address.port)
            message, hint = f"{error.message}{f', held by {holder}' if holder else ''}", error.hint
        subject, free = f"{address.protocol} port {address.port}", message == "free"
        yield graded(subject, message, error=not free, hint=hint, port=address.port, free=free, holder=holder)
        taken.append(address)


def _read_flags(request: Request) -> TritonFlags:
    """The user's flags; the defaults where they cannot be read, which the check of tritonserver reports."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import DEFAULT_HOST, TritonFlags
    from graphkiln_backend.server.installation import find_installation

    host = request.host or DEFAULT_HOST
    with suppress(ServerSetupError):
        return TritonFlags.parse(request.arguments, find_installation().flags, host)
    return TritonFlags.parse((), {}, host)


def find_holder(port: int) -> str:
    """The program that listens on a port, or empty where this user may not know."""
    import psutil

    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
