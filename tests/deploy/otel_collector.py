"""A collector of OpenTelemetry traces (OTLP over HTTP, JSON) that keeps all spans."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Collector on a free port; use it as a context manager."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.spans = []  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Spans, each with its `resource`: the attributes of the sender."""
        return list(self._server.spans)  # type: ignore[attr-defined]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(each: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a span or a resource by name."""
    return {pair["key"]: next(iter(pair["value"].values())) for pair in each.get("attributes", ())}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for group in body["resourceSpans"]:
            for scope in group["scopeSpans"]:
                for span in scope["spans"]:
                    self.server.spans.append({**span, "resource": attributes(group["resource"])})  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
