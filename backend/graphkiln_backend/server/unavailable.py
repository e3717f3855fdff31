"""A listener on the HTTP port while the server restarts or stops: clients get 503, not a dead port.

It shares the port with tritonserver (SO_REUSEPORT). A filter in the kernel gives each new connection to the second of
the sockets that share it, or to the only one: while the server stops, that is this listener; when the next server
opens its port, that is the server, at once.

Closing a socket that listens resets connections that the kernel has accepted meanwhile. So another filter first drops
what would open one: its client's kernel tries again a second later, and finds the server or a closed port.
"""

from __future__ import annotations

import ctypes
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.system.closing import Closeable

RESTARTING = "the server restarts, try again in a few seconds"
STOPPING = "the server is stopping"

_RETRY_AFTER_S = 1
_LINGER_S = 1.0  # how long a client may take to close its end; closing a connection with unread bytes would reset it
_HANDSHAKE_S = 0.05  # how long the last part of a handshake that has begun may take
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 51  # Source: socket(7)
_FILTER = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06  # with constants. Source: linux/bpf_common.h
_TCP_FLAGS_AT, _SYN, _ACK = 13, 0x02, 0x10  # Source: RFC 9293, 3.1
_SECOND = 1
_GIVE_TO_SECOND = [(_RETURN, 0, 0, _SECOND)]
_DROP_OPENING = [
    (_LOAD_BYTE, 0, 0, _TCP_FLAGS_AT),
    (_AND, 0, 0, _SYN | _ACK),
    (_JUMP_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
]


class UnavailableListener(Closeable):
    """Respond to every request with 503 until it is closed.

    Args:
        address: The server's HTTP address; the server must have been started with `--reuse-http-port=true`.
        reason: Why, for the response.

    Raises:
        OSError: The port cannot be shared.
    """

    def __init__(self, address: ListenAddress, reason: str = RESTARTING) -> None:
        listener = _Listener6 if ":" in address.host else _Listener
        self._listener = listener((address.host, address.port), _Handler)
        self._listener.body = json.dumps({"error": reason}).encode()
        _attach(self._listener.socket, _SO_ATTACH_REUSEPORT_CBPF, _GIVE_TO_SECOND)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), name="graphkiln-unavailable")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True if a connection is open that was accepted or adopted."""
        return self._listener.open > 0

    def adopt(self, connection: socket.socket) -> None:
        """Answer the next request of a client of the server that has ended, and close the connection."""
        connection.setblocking(True)
        self._listener.process_request(connection, ("", 0))

    def close(self) -> None:
        """Stop listening; connections that were accepted, and those that the kernel has accepted, are answered."""
        self._listener.shutdown()
        self._thread.join()
        listener = self._listener.socket
        _attach(listener, _SO_ATTACH_FILTER, _DROP_OPENING)
        deadline = time.monotonic() + _LINGER_S  # where the filter is not allowed, more may come for ever
        with suppress(OSError):
            while time.monotonic() < deadline and select.select([listener], [], [], _HANDSHAKE_S)[0]:
                self.adopt(listener.accept()[0])
        self._listener.server_close()


class _Listener(ThreadingHTTPServer):
    allow_reuse_port = True
    daemon_threads = True  # closing waits for no client that sends nothing
    request_queue_size = 128
    body = b""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.open = 0
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self.open += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection when its client has, so that no response is lost to a reset."""
        try:
            with suppress(OSError):
                request.shutdown(socket.SHUT_WR)
                deadline = time.monotonic() + _LINGER_S
                while (left_s := deadline - time.monotonic()) > 0:
                    request.settimeout(left_s)
                    if not request.recv(1 << 16):
                        break
            self.close_request(request)
        finally:
            with self._lock:
                self.open -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that breaks off is no fault of ours."""


class _Listener6(_Listener):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: _Listener

    def __getattr__(self, name: str) -> Any:
        """Every method of HTTP gets the same response."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.send_header("Retry-After", str(_RETRY_AFTER_S))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a health check every second would fill the log."""


def _attach(listener: socket.socket, option: int, instructions: Sequence[tuple[int, int, int, int]]) -> None:
    """Run a program in the kernel for a socket; where that is not allowed, all goes on without it."""
    packed = b"".join(_FILTER.pack(*instruction) for instruction in instructions)
    program = ctypes.create_string_buffer(packed, len(packed))
    with suppress(OSError):
        address = _PROGRAM.pack(len(instructions), ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, option, address.ljust(16, b"\0"))
