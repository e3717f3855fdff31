"""Part of Google Cloud Storage's JSON API over HTTP: listing in pages, metadata, conditional reads.

Source: "Cloud Storage JSON API", Objects: list and get.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PATH = re.compile(r"/(?:download/)?storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<key>[^/]+))?")


class GoogleStore:
    """The server, a context manager."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, tuple[bytes, int]]] = defaultdict(dict)
        self._generation = 1000
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                store._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def address(self) -> str:
        """Value of `STORAGE_EMULATOR_HOST`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def put(self, bucket: str, key: str, content: bytes) -> None:
        """Write or replace an object."""
        self._generation += 1
        self.buckets[bucket][key] = (content, self._generation)

    def __enter__(self) -> GoogleStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        found = _PATH.fullmatch(url.path)
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        if not found or found["bucket"] not in self.buckets:
            return _send(request, 404, {"error": {"code": 404, "message": "Not Found"}})
        objects = self.buckets[found["bucket"]]
        if not found["key"]:
            return _send(request, 200, _page(found["bucket"], objects, options))
        key = unquote(found["key"])
        if key not in objects:
            return _send(request, 404, {"error": {"code": 404, "message": f"No such object: {key}"}})
        content, generation = objects[key]
        if options.get("ifGenerationMatch", str(generation)) != str(generation):
            return _send(request, 412, {"error": {"code": 412, "message": "conditionNotMet"}})
        if options.get("alt") != "media":
            return _send(request, 200, _describe(found["bucket"], key, content, generation))
        return _send_part(request, content)


def _page(bucket: str, objects: dict[str, tuple[bytes, int]], options: dict[str, str]) -> dict[str, Any]:
    after = options.get("pageToken", "")
    keys = [key for key in sorted(objects, key=str.encode) if key.startswith(options.get("prefix", "")) and key > after]
    listed = keys[: int(options.get("maxResults", 1000))]
    page: dict[str, Any] = {"kind": "storage#objects"}
    if listed:
        page["items"] = [_describe(bucket, key, *objects[key]) for key in listed]
    if len(listed) < len(keys):
        page["nextPageToken"] = listed[-1]
    return page


def _describe(bucket: str, key: str, content: bytes, generation: int) -> dict[str, Any]:
    return {"bucket": bucket, "name": key, "size": str(len(content)), "generation": str(generation)}


def _send(request: BaseHTTPRequestHandler, status: int, document: Any) -> None:
    content = json.dumps(document).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


def _send_part(request: BaseHTTPRequestHandler, content: bytes) -> None:
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if asked:
        content = content[int(asked[1]) : int(asked[2] or len(content)) + 1]
    request.send_response(206 if asked else 200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)
