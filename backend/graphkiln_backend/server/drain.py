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

import logging
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from graphkiln_backend.server.connections import HeldConnection, HeldConnections
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.unavailable import STOPPING, UnavailableListener
from graphkiln_backend.server.watchdog import exit_code
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import kill_group
from graphkiln_backend.system.signals import StopSignals
from graphkiln_backend.triton.snapshot import SnapshotReader

_log = logging.getLogger("graphkiln.server")

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
            What to exit with: 0 where the supervisor ended the server, 128 + SIGKILL where that was at a second
            signal, the server's own code where it ended by itself.
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
        """End a server without connections that we hold; by itself first, so that it can write its traces."""
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
        """End the server, and respond to its clients.

        It is killed at once, without time for its traces: on SIGTERM it would wait until its clients have closed these
        connections (see above).
        """
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
