"""Responds with 503 on the HTTP port while the server restarts: health checks see "not ready" and not a dead port.

It shares the port with tritonserver (SO_REUSEPORT): it can listen before the old server is gone and until the new one
responds; the kernel spreads connections over both for the few milliseconds in which both listen.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.server.flags import ListenAddress

_BODY = json.dumps({"error": "a model instance died: the server restarts, try again in a few seconds"}).encode()
_RETRY_AFTER_S = 1


class UnavailableListener(Closeable):
    """Responds to every request with 503 until it is closed.

    Args:
        address: The server's HTTP address; the server must have been started with `--reuse-http-port=true`.

    Raises:
        OSError: The port cannot be shared.
    """

    def __init__(self, address: ListenAddress) -> None:
        listener = _Listener6 if ":" in address.host else _Listener
        self._listener = listener((address.host, address.port), _Handler)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), name="graphkiln-unavailable")
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


class _Listener(ThreadingHTTPServer):
    allow_reuse_port = True
    daemon_threads = True  # closing waits for no client that sends nothing


class _Listener6(_Listener):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = 5

    def __getattr__(self, name: str) -> Any:
        """Every method of HTTP gets the same response."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_BODY)))
        self.send_header("Retry-After", str(_RETRY_AFTER_S))
        self.end_headers()
        self.wfile.write(_BODY)

    def log_message(self, *_: object) -> None:
        """Logs nothing: a health check every second would fill the log."""
