"""Ports of servers: claimed by a start, published in the run folder, read by the image's health check."""

from __future__ import annotations

import errno
import json
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.server.flags import SERVICES, ListenAddress, TritonFlags, free_port
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, locked_if_dead, owned_folders

# A start claims its ports by abstract Unix socket names, because tritonserver opens them only after loading its models,
# which may take minutes. Otherwise a second start would load the same models before it fails. Like ports, the names
# vanish with the process and belong to a network namespace. Source: unix(7).


class PortClaims(Closeable):
    """Claim the ports of a server until it is closed, except deliberately shared ones.

    Raises:
        ServerSetupError: Another start has claimed a port; the hint suggests a free one.
    """

    def __init__(self, flags: TritonFlags) -> None:
        self._claims = ExitStack()
        try:
            for service in SERVICES:
                address = flags.listen_address(service)
                if address and not flags.shares(service):
                    self._claim(service, address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the ports."""
        self._claims.close()

    def _claim(self, service: str, address: ListenAddress) -> None:
        claim = self._claims.enter_context(socket.socket(socket.AF_UNIX))
        try:
            claim.bind(f"\0graphkiln {address.host}:{address.port}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # otherwise: no abstract names here
                raise ServerSetupError(
                    f"port {address.port} ({address.protocol}) is reserved by another graphkiln server that "
                    "is starting or stopping",
                    hint=f"wait for it, or choose another port: --{service}-port={free_port()}",
                ) from error


_BACKLOG = 1024


def listen(address: ListenAddress, *, shared: bool = False) -> socket.socket:
    """Listen on an address; with `shared`, other programs may share the port.

    Raises:
        ServerSetupError: The address is in use, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    both = address.host == "::"  # every interface, of both families
    try:
        return socket.create_server(
            (address.host, address.port), family=family, backlog=_BACKLOG, reuse_port=shared, dualstack_ipv6=both
        )
    except OSError as error:
        where = f"{address.host}:{address.port} ({address.protocol})"
        raise ServerSetupError(f"cannot listen on {where}: {error.strerror}") from error


_TIMEOUT_S = 5
_LIMIT = 16 * MIB


def fetch_metrics(url: str) -> str:
    """Fetch metrics in Prometheus text format, ignoring proxies of the environment.

    Raises:
        OSError: There is no response.
        ValueError: The URL is invalid.
    """
    # Imported here, because starts also import this file and do not need http.client and ssl.
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as response:
        return str(response.read(_LIMIT).decode("utf-8", "replace"))


_FILE = "address.json"


def publish_address(folder: Path, flags: TritonFlags) -> None:
    """Write the HTTP address of a server, or else its gRPC address, to its run folder.

    Raises:
        OSError: The file cannot be written.
    """
    for protocol in ("http", "grpc"):
        if address := flags.listen_address(protocol):
            (folder / _FILE).write_text(json.dumps([protocol, *address.local_address]) + "\n")
            return


def served_addresses(parents: Iterable[Path] | None = None) -> Iterator[tuple[str, str, int]]:
    """Yield protocol, host and port of each running server of this user.

    Args:
        parents: Parents of run folders; None for all.
    """
    for parent in parents or sorted({Path(tempfile.gettempdir()), *OTHER_PARENTS}):
        for run in owned_folders(parent):
            with suppress(OSError, ValueError):
                protocol, host, port = json.loads((run / _FILE).read_text())
                with locked_if_dead(run) as dead:
                    is_dead = dead
                if not is_dead:
                    yield str(protocol), str(host), int(port)
