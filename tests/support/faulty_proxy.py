"""A proxy for an object store that loses responses, refuses, or cuts them on command."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A request is carried out and its answer lost; is answered with 503, or 403; is confirmed and forgotten; its body is
# cut.
LOSE, REFUSE, DENY, LIE, CUT = "lose", "refuse", "deny", "lie", "cut"


class FaultyProxy:
    """The proxy, a context manager.

    Args:
        target: `HOST:PORT` of the store.
    """

    def __init__(self, target: str) -> None:
        self.fault: Callable[[str, str], str | None] = lambda _method, _path: None
        self.requests: list[tuple[str, str]] = []
        self._target = target
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def times(self, count: int, fault: str, method: str = "PUT") -> None:
        """Apply a fault to the next requests of a method."""
        left = [count]

        def choose(used: str, _path: str) -> str | None:
            if used != method or not left[0]:
                return None
            left[0] -= 1
            return fault

        self.fault = choose

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Bound(_Handler):
            def exchange(self, body: bytes) -> None:
                proxy.requests.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                if fault == REFUSE:
                    self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
                elif fault == DENY:
                    self.answer(403, {}, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
                elif fault == LIE:
                    self.answer(200, {"ETag": '"0"'}, b"")
                else:
                    status, headers, content = proxy._forward(self.command, self.path, dict(self.headers), body)
                    self.close_connection = True
                    if fault != LOSE:
                        self.answer(status, headers, content[: len(content) // 2] if fault == CUT else content)

        return Bound

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=30)
        try:
            kept = {name: value for name, value in headers.items() if name not in {"Expect", "Host", "Connection"}}
            connection.request(method, path, body, kept)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients wait for its "100 Continue"
    timeout = 5

    def exchange(self, body: bytes) -> None:
        raise NotImplementedError

    def handle_any(self) -> None:
        self.exchange(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

    def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        length = headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        for name, value in headers.items():
            if name not in {"Content-Length", "Connection", "Transfer-Encoding", "Date", "Server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length or "0")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
