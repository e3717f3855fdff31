"""The ports that the server would listen on: free, or who holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from graphkiln.doctor.finding import Finding, Level, Request

if TYPE_CHECKING:
    from graphkiln_backend.server.flags import ListenAddress, TritonFlags

SERVICES = ("http", "grpc", "metrics")


def check_ports(request: Request) -> Iterator[Finding]:
    """Each port."""
    from graphkiln_backend.graph.errors import ServerSetupError

    taken: list[ListenAddress] = []
    flags = _read_flags(request)
    for service in SERVICES:
        try:
            address = flags.listen_address(service)
        except ServerSetupError as error:
            yield Finding(subject=service, level=Level.ERROR, message=error.message, hint=error.hint)
            continue
        if address is None:
            yield Finding(subject=service, message="switched off")
        else:
            yield find_port(service, address, taken)
            taken.append(address)


def _read_flags(request: Request) -> TritonFlags:
    """The user's flags; none where they cannot be read, which the check of tritonserver says."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import DEFAULT_HOST, TritonFlags
    from graphkiln_backend.server.installation import find_installation

    host = request.host or DEFAULT_HOST
    with suppress(ServerSetupError):
        return TritonFlags.parse(request.arguments, find_installation().flags, host)
    return TritonFlags.parse((), {}, host)


def find_port(service: str, address: ListenAddress, taken: Sequence[ListenAddress] = ()) -> Finding:
    """One port.

    Args:
        service: Triton's name of it.
        address: Where it would listen.
        taken: Where other services of the same server would.
    """
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import check_distinct, check_free

    subject = f"{address.protocol} port {address.port}"
    try:
        check_distinct(service, address, taken)
        check_free(service, address)
    except ServerSetupError as error:
        holder = find_holder(address.port)
        return Finding(
            subject=subject,
            level=Level.ERROR,
            message=f"{error.message}{f', held by {holder}' if holder else ''}",
            hint=error.hint,
            facts={"port": address.port, "free": False, "holder": holder},
        )
    return Finding(subject=subject, message="free", facts={"port": address.port, "free": True, "holder": ""})


def find_holder(port: int) -> str:
    """The program that listens on a port, or empty where this user may not know."""
    import psutil

    with suppress(psutil.Error, OSError):
        listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        for connection in listening:
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
