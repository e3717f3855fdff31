"""The ports that a start has chosen: tritonserver opens them when its models are loaded, which may take minutes.

Until then another start finds them free, loads the same models, and fails at its end. Where both serve HTTP alone, they
even share the port, as Triton is told to (see `server.unavailable`), and each gets some of the requests. So a start
claims its ports: by Unix sockets with names that nobody else can have meanwhile. These names end with the process, and
hold, as ports do, within a namespace of the network. Source: unix(7), abstract socket addresses.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import SERVICES, ListenAddress, TritonFlags, free_port
from graphkiln_backend.system.closing import Closeable


class PortClaims(Closeable):
    """Claims every port of a server that it does not share on purpose, until it is closed.

    Args:
        flags: The user's.

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
        """Gives the ports up."""
        self._claims.close()

    def _claim(self, service: str, address: ListenAddress) -> None:
        claim = self._claims.enter_context(socket.socket(socket.AF_UNIX))
        try:
            claim.bind(f"\0graphkiln {address.host}:{address.port}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # else a system without such names: the port itself will tell
                raise ServerSetupError(
                    f"port {address.port} ({address.protocol}) is that of another server, which starts or stops",
                    hint=f"wait for it, or choose another port: --{service}-port={free_port()}",
                ) from error
