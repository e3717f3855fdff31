"""Ports of servers: claimed by a start, published in a run's folder, found by the health check of an image."""

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

# A start claims its ports by Unix sockets with names that are taken meanwhile: tritonserver opens the ports when its
# models are loaded, which may take minutes. Until then another start would find them free, load the same models, and
# fail at its end. The names end with the process, and hold, as ports do, within a namespace of the network.
# Source: unix(7), abstract socket addresses.


class PortClaims(Closeable):
    """Claim every port of a server that it does not share on purpose, until it is closed.

    Raises:
        ServerSetupError: Another start has claimed one; the hint names a free one.
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
            if error.errno == errno.EADDRINUSE:  # else a system without such names: the port itself will tell
                raise ServerSetupError(
                    f"port {address.port} ({address.protocol}) is reserved by another graphkiln server that "
                    "is starting or stopping",
                    hint=f"wait for it, or choose another port: --{service}-port={free_port()}",
                ) from error


_BACKLOG = 1024


def listen(address: ListenAddress, *, shared: bool = False) -> socket.socket:
    """Listen at an address; `shared`: with other programs that share its port.

    Raises:
        ServerSetupError: It is in use, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG, reuse_port=shared)
    except OSError as error:
        where = f"{address.host}:{address.port} ({address.protocol})"
        raise ServerSetupError(f"cannot listen on {where}: {error.strerror}") from error


_TIMEOUT_S = 5
_LIMIT = 16 * MIB


def fetch_metrics(url: str) -> str:
    """Fetch the metrics in Prometheus' text format, without any proxy that the environment names.

    Raises:
        OSError: There is no response.
        ValueError: It is no URL.
    """
    # Only commands ask over HTTP: a start, which also needs this file, does without http.client and ssl.
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as response:
        return str(response.read(_LIMIT).decode("utf-8", "replace"))


_FILE = "address.json"


def publish_address(folder: Path, flags: TritonFlags) -> None:
    """Write down where a server listens: for HTTP, or else for gRPC.

    Raises:
        OSError: The file cannot be written.
    """
    for protocol in ("http", "grpc"):
        if address := flags.listen_address(protocol):
            (folder / _FILE).write_text(json.dumps([protocol, *address.local_address]) + "\n")
            return


def served_addresses(parents: Iterable[Path] | None = None) -> Iterator[tuple[str, str, int]]:
    """Protocol, host and port of each server of this user that runs on this machine.

    Args:
        parents: Where run folders are; None for all places.
    """
    for parent in parents or sorted({Path(tempfile.gettempdir()), *OTHER_PARENTS}):
        for run in owned_folders(parent):
            with suppress(OSError, ValueError):
                protocol, host, port = json.loads((run / _FILE).read_text())
                with locked_if_dead(run) as dead:
                    is_dead = dead
                if not is_dead:
                    yield str(protocol), str(host), int(port)
