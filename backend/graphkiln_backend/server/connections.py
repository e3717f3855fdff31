"""Another process's TCP connections: duplicated, paused, and kept open when that process ends.

Why: tritonserver (24.10) ends with its clients' connections open, and a request that is on its way then is lost. What
a duplicate shares with the original is the socket itself. So the supervisor can see whether a request is under way on
it, keep the server from reading the next one (SO_RCVLOWAT), and, when the server has ended, still answer that one.

pidfd_getfd(2) needs Linux 5.6 and the right to trace the process. A parent has it for its children, but Docker's
default seccomp profile forbids the call: then there are no duplicates, and clients see their connections closed.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys
import termios
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the same on x86-64 and arm64. Source: pidfd_getfd(2)
# `tcpi_last_data_sent` and `tcpi_last_data_recv`, milliseconds ago. Source: struct tcp_info of linux/tcp.h
_AGES = struct.Struct("=IxxxxI")
_AGES_AT = 44
_BYTES = struct.Struct("=Q")
_RECEIVED_AT, _SENT_AT = 128, 200
_OWN_DESCRIPTORS = 128
_PAUSED = 1 << 30  # more than a receive buffer can hold: the kernel never reports the connection as readable


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes and times of a connection.

    Attributes:
        sent: Bytes that were sent to the client.
        sent_ago_s: Seconds since data was sent to the client.
        received_ago_s: Seconds since data came from it.
        consumed: Bytes that the server has read.
        unread: Bytes that it has not read yet.
    """

    sent: int
    sent_ago_s: float
    received_ago_s: float
    consumed: int
    unread: int

    @property
    def under_way(self) -> bool:
        """True if the server has begun to read something that it has not responded to."""
        return self.consumed > 0 and (self.sent == 0 or self.received_ago_s < self.sent_ago_s)


class HeldConnection(Closeable):
    """A duplicate of a connection.

    Attributes:
        socket: The socket, shared with the other process.
        port: The server's port.
        paused: Its traffic when the server was first kept from reading; None before.
    """

    def __init__(self, held: socket.socket, port: int) -> None:
        self.socket = held
        self.port = port
        self.paused: Traffic | None = None

    @property
    def doubtful(self) -> bool:
        """True if a request may have been under way when it was paused, which was not responded to since."""
        before = self.paused
        if before is None or before.received_ago_s != before.sent_ago_s:
            return False
        return before.sent == self.traffic.sent

    @property
    def traffic(self) -> Traffic:
        """Bytes and times so far."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent_ms, received_ms = _AGES.unpack_from(info, _AGES_AT)
        (received,), (sent,) = _BYTES.unpack_from(info, _RECEIVED_AT), _BYTES.unpack_from(info, _SENT_AT)
        unread = array.array("i", [0])
        fcntl.ioctl(self.socket, termios.FIONREAD, unread)
        return Traffic(
            sent=sent,
            sent_ago_s=sent_ms / 1e3,
            received_ago_s=received_ms / 1e3,
            consumed=received - unread[0],
            unread=unread[0],
        )

    def pause(self) -> bool:
        """Keep the server from reading what comes from now on; False when it has read something just now."""
        before = self.traffic
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PAUSED)
        if self.traffic.consumed != before.consumed:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return False
        self.paused = before
        return True

    def release(self) -> socket.socket:
        """A second duplicate, readable again, to go on with the connection and close it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return self.socket.dup()

    def close(self) -> None:
        """Close the duplicate; the connection itself when the server has ended."""
        self.socket.close()


class HeldConnections(Closeable):
    """All connections of a process to some ports, as they come and go.

    Raises:
        OSError: The kernel allows no duplicates.
    """

    def __init__(self, process: int, ports: Collection[int]) -> None:
        self._process = process
        self._ports = ports
        self._held: dict[tuple[int, object], HeldConnection] = {}
        self._room = _allow_descriptors() - _OWN_DESCRIPTORS
        self._pidfd = os.pidfd_open(process)
        try:
            os.close(_duplicate(self._pidfd, 0))  # its standard input: tells whether it is allowed
        except OSError:
            os.close(self._pidfd)
            raise

    def refresh(self) -> list[HeldConnection]:
        """Take new connections, close those that the server has closed, and return all."""
        open_now: set[tuple[int, object]] = set()
        for found in psutil.Process(self._process).net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN or found.laddr.port not in self._ports:
                continue
            key: tuple[int, object] = (found.fd, found.raddr)
            open_now.add(key)
            if key not in self._held and len(self._held) < self._room and (taken := self._take(found.fd)):
                self._held[key] = HeldConnection(taken, found.laddr.port)
        for key in self._held.keys() - open_now:
            self._held.pop(key).close()
        return list(self._held.values())

    def close(self) -> None:
        """Close all duplicates that were not released."""
        for held in self._held.values():
            held.close()
        self._held.clear()
        os.close(self._pidfd)

    def _take(self, descriptor: int) -> socket.socket | None:
        try:
            return socket.socket(fileno=_duplicate(self._pidfd, descriptor))
        except OSError:  # closed meanwhile
            return None


def _allow_descriptors() -> int:
    """Raise the limit of open descriptors as far as allowed, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def _duplicate(pidfd: int, descriptor: int) -> int:
    """A duplicate of another process's descriptor.

    Raises:
        OSError: It is closed, or duplicates are not allowed.
    """
    copy = int(_LIBC.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return copy
