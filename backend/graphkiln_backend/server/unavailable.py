"""Responds with 503 on the HTTP port while the server restarts or stops: clients see "not ready" and not a dead port.

It shares the port with tritonserver (SO_REUSEPORT). A filter in the kernel gives each new connection to the second of
the sockets that share it, or to the only one: while the server stops, that is this listener; when the next server
opens its port, that is the server, at once.
"""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.server.flags import ListenAddress

RESTARTING = "the server restarts, try again in a few seconds"
STOPPING = "the server is stopping"

_RETRY_AFTER_S = 1
_LINGER_S = 1.0
"""How long a client may take to close its end; closing a connection with unread bytes would reset it."""
_SO_ATTACH_REUSEPORT_CBPF = 51  # Source: socket(7)
_FILTER = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")
_RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K of linux/bpf_common.h
_SECOND = 1


class UnavailableListener(Closeable):
    """Responds to every request with 503 until it is closed.

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
        _prefer_second(self._listener.socket)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), name="graphkiln-unavailable")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a connection is open that was accepted or adopted."""
        return self._listener.open > 0

    def adopt(self, connection: socket.socket) -> None:
        """Answers the next request of a client of the server that has ended, and closes the connection."""
        connection.setblocking(True)
        self._listener.process_request(connection, ("", 0))

    def close(self) -> None:
        """Stops listening; connections that were accepted, and those that the kernel has accepted, are answered."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.socket.setblocking(False)
        with suppress(OSError):
            while True:
                self.adopt(self._listener.socket.accept()[0])
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
        """Closes a connection when its client has, so that no response is lost to a reset."""
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
        """Says nothing: a client that breaks off is no fault of ours."""


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
        """Logs nothing: a health check every second would fill the log."""


def _prefer_second(listener: socket.socket) -> None:
    """Gives new connections to the second of the sockets that share a port, where there are two."""
    program = ctypes.create_string_buffer(_FILTER.pack(_RETURN_CONSTANT, 0, 0, _SECOND), _FILTER.size)
    with suppress(OSError):  # without it the kernel spreads them over both
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, _PROGRAM.pack(1, ctypes.addressof(program)).ljust(16, b"\0")
        )
