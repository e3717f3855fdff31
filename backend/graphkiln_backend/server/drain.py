"""The end of a server: every request that it has read is answered, and no connection is reset.

What Triton (24.10) does by itself on SIGTERM: it waits for every HTTP connection to be closed by its client, 30 s where
one is kept alive, resets new ones, exits with code 1, and unloads its models before its gRPC port closes, so that calls
get NOT_FOUND. So the supervisor drains:

1. New HTTP connections go to the supervisor, which responds with 503 and `Connection: close`.
2. On every open connection the server may finish the request that it has begun to read, and is kept from the next one.
3. When nothing has been in flight for a moment, the server is ended. Its connections stay open, in the supervisor's
   hands: over HTTP the next request gets 503 and `Connection: close`, over gRPC the client gets GOAWAY, and its library
   reports UNAVAILABLE.

After the time limit the server is ended in any case. Where the kernel allows no duplicates of connections, clients that
keep sending see them closed in the third step.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.unavailable import STOPPING, UnavailableListener
from graphkiln_backend.server.watchdog import exit_code
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import kill_group
from graphkiln_backend.system.signals import StopSignals
from graphkiln_backend.triton.snapshot import SnapshotReader

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")

# Another process's TCP connections: duplicated, paused, and kept open when that process ends.
#
# Why: tritonserver (24.10) ends with its clients' connections open, and a request that is on its way then is lost. What
# a duplicate shares with the original is the socket itself. So the supervisor can see whether a request is under way on
# it, keep the server from reading the next one (SO_RCVLOWAT), and, when the server has ended, still answer that one.
#
# pidfd_getfd(2) needs Linux 5.6 and the right to trace the process. A parent has it for its children, but Docker's
# default seccomp profile forbids the call: then there are no duplicates, and clients see their connections closed.


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


_POLL_S = 0.02
_SETTLE_S = 0.5  # longer than the time between a request's last byte and its batch
_DOUBT_S = 2.0  # the same where the last response and another request came at the same time
_EXIT_S = 1.0  # for a server without open connections to end by itself
# A client that was silent for so long before is not waited for: it learns that its connection is closed.
_LINGER_S = 2.0
_GOAWAY_S = 1.0
# The frame: 8 bytes, type 7, no flags, stream 0; last stream 0, NO_ERROR. Source: RFC 9113, 6.8
_GOAWAY = bytes.fromhex("000008 07 00 00000000 00000000 00000000")


class Drain(Closeable):
    """The end of one run of the server."""

    def __init__(
        self,
        server: subprocess.Popen[bytes],
        folder: RunFolder,
        flags: TritonFlags,
        signals: StopSignals,
        limit_s: float,
    ) -> None:
        self._server, self._signals = server, signals
        self._instances = SnapshotReader(folder.instances)
        self._flags = flags
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._resources = ExitStack()
        self._listener: UnavailableListener | None = None
        self._connections: HeldConnections | None = None
        self._counts: dict[str, tuple[int, int]] = {}
        self._counted_at = time.monotonic()

    def close(self) -> None:
        """Close what `run` has opened, after a moment for responses to clients that had reached the port."""
        self._resources.close()
        deadline = min(time.monotonic() + _LINGER_S, self._deadline + _GOAWAY_S)
        while self._listener and self._listener.busy and time.monotonic() < deadline and self._signals.count < 2:
            self._signals.wait([], _POLL_S)

    def run(self, *, live: bool) -> int:
        """Drain, and end the server.

        Returns:
            What to exit with: 0 where the supervisor ended the server, the server's own code where it ended by itself.
        """
        _log.info("stopping: finishing the requests in flight")
        if live:
            self._take_over()
            self._wait(self._is_quiet, self._deadline)
            if self._signals.count > 1:
                _log.warning("stopping at once: second signal")
                kill_group(self._server)
                return 128 + signal.SIGKILL
            self._report()
        held = self._connections.refresh() if self._connections and self._server.poll() is None else []
        return self._hand_over(held) if held else self._end()

    def _take_over(self) -> None:
        """Begin to answer new HTTP connections, and to hold the open ones."""
        addresses = {service: self._flags.listen_address(service) for service in ("http", "grpc")}
        http = addresses["http"]
        if http:
            try:
                self._listener = self._resources.enter_context(UnavailableListener(http, STOPPING))
            except OSError as error:  # the user's own --reuse-http-port=false
                _log.warning("new HTTP connections are not answered with 503: %s", error)
        ports = {address.port for address in addresses.values() if address}
        try:
            self._connections = self._resources.enter_context(HeldConnections(self._server.pid, ports))
        except OSError as error:
            _log.info("open connections will be closed, not answered with 503: %s", error)

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition; False when the server ended, a second signal came or the time was over before."""
        while self._signals.count <= 1 and self._server.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            self._signals.wait([self._server.pid], _POLL_S)
        return False

    def _is_quiet(self) -> bool:
        """True if no request that the server has begun to read is unanswered."""
        connections = self._connections.refresh() if self._connections else []
        under_way = [held for held in connections if not self._try_pause(held)]
        idle_s = self._idle_s()
        return not under_way and idle_s > _SETTLE_S and all(_is_settled(held) for held in connections)

    def _idle_s(self) -> float:
        """Seconds for which no instance has computed."""
        progress = self._instances.read().progress
        counts = {key: (value.begun, value.ended) for key, value in progress.items()}
        now = time.monotonic()
        if counts != self._counts or any(value.computing for value in progress.values()):
            self._counts, self._counted_at = counts, now
        return now - self._counted_at

    def _try_pause(self, held: HeldConnection) -> bool:
        """Keep the server from the next request on a connection, unless it has begun one and not answered it."""
        if held.paused:
            return True
        before = held.traffic
        # Over HTTP/2, clients send frames that get no response.
        if before.under_way and (held.port != self._grpc_port or before.received_ago_s < _POLL_S):
            return False
        return held.pause()

    @property
    def _grpc_port(self) -> int | None:
        address = self._flags.listen_address("grpc")
        return address.port if address else None

    def _report(self) -> None:
        if time.monotonic() > self._deadline:
            computing = sum(progress.computing for progress in self._instances.read().progress.values())
            _log.warning(
                "requests are still in flight after %g s (--drain), %d batches are being computed: ending them",
                self._limit_s,
                computing,
            )

    def _end(self) -> int:
        """End a server without connections; by itself first, so that it can write its traces."""
        if self._server.poll() is None:
            self._server.send_signal(signal.SIGTERM)
            self._wait(lambda: False, time.monotonic() + _EXIT_S)
        code = self._server.poll() or 0
        kill_group(self._server)
        if code in (0, -signal.SIGTERM):  # by our own signal, before it listened to any
            _log.info("stopped")
            return 0
        _log.info("tritonserver ended with code %d", exit_code(code))
        return exit_code(code)

    def _hand_over(self, connections: Sequence[HeldConnection]) -> int:
        """End the server, and respond to its clients."""
        traffic = {held: held.traffic for held in connections}
        kill_group(self._server)
        calls = [held.release() for held in connections if held.port == self._grpc_port]
        for held in connections:
            if held.port != self._grpc_port:
                if self._listener and (traffic[held].unread or traffic[held].received_ago_s < _LINGER_S):
                    self._listener.adopt(held.release())
                held.close()
        _say_goodbye(calls if self._flags.values.get("grpc-use-ssl", "false") == "false" else [])
        _log.info("stopped")
        return 0


def _is_settled(held: HeldConnection) -> bool:
    return held.traffic.sent_ago_s > (_DOUBT_S if held.doubtful else _SETTLE_S)


def _say_goodbye(calls: Sequence[socket.socket]) -> None:
    """Send GOAWAY to gRPC clients, and wait a moment until they have closed their connections."""
    for call in calls:
        with suppress(OSError):
            call.setblocking(False)
            call.send(_GOAWAY)
            call.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + _GOAWAY_S
    waiting = {call.fileno(): call for call in calls}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left_s * 1e3):
            if not _has_more(waiting[descriptor]):
                poll.unregister(descriptor)
                waiting.pop(descriptor)
    for call in calls:
        call.close()


def _has_more(call: socket.socket) -> bool:
    try:
        return bool(call.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False
