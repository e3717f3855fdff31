"""Whether tritonserver itself still responds: one small request a second, asked and read without waiting."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from typing import Any

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.grpc_control import ask_whether_live, open_channel
from graphkiln_backend.server.suspension import SuspensionDetector
from graphkiln_backend.system.closing import Closeable

_CONNECT_S = 0.5
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class _Probe(Closeable):
    """Knows since when a server is silent; how it is asked is its protocol's."""

    def __init__(self) -> None:
        self._answered_at = time.monotonic()
        self._suspension = SuspensionDetector()

    def silent_s(self) -> float:
        """Seconds since the server's last response. To be called regularly: a call asks, a later one reads."""
        if self._suspension.has_resumed():
            self._answered_at = time.monotonic()
        self._ask_or_read()
        return time.monotonic() - self._answered_at

    @abstractmethod
    def _ask_or_read(self) -> None:
        """Asks, or looks whether what was asked is answered, without waiting."""


class GrpcLivenessProbe(_Probe):
    """Asks a server that speaks gRPC only; any response will do.

    Args:
        address: Where it listens for gRPC, without TLS.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._channel = open_channel(address)
        self._call: Any = None
        super().__init__()

    def _ask_or_read(self) -> None:
        if self._call is None:
            self._call = ask_whether_live(self._channel)
        elif self._call.done():
            if _is_answer(self._call):
                self._answered_at = time.monotonic()
            self._call = None

    def close(self) -> None:
        """Waits for no response any more."""
        self._channel.close()


def _is_answer(call: Any) -> bool:
    """Whether the server itself has ended a call; so it has where the user restricts this protocol, too."""
    return call.code().name not in {"UNAVAILABLE", "CANCELLED"} or "restricted" in call.details()


class LivenessProbe(_Probe):
    """Asks a server over HTTP whether it lives; any response will do.

    Args:
        address: Where it listens for HTTP.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        super().__init__()

    def _ask_or_read(self) -> None:
        if self._connection is None:
            self._ask()
        else:
            self._read(self._connection)

    def close(self) -> None:
        """Waits for no response any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self) -> None:
        try:
            self._connection = socket.create_connection(self._address.local_address, timeout=_CONNECT_S)
            self._connection.sendall(_REQUEST)
            self._connection.setblocking(False)
        except OSError:
            self.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            answered = bool(connection.recv(4096))
        except BlockingIOError:
            return
        except OSError:
            answered = False
        if answered:
            self._answered_at = time.monotonic()
        self.close()
