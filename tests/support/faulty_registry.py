"""A registry over HTTP with one artifact and selectable faults: it hangs, loses or alters a layer."""

from __future__ import annotations

import hashlib
import http.server
import json
import ssl
import threading

from graphkiln_backend.storage.oci import MANIFEST_TYPE, TITLE
from graphkiln_backend.system.closing import Closeable


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore failed handshakes and clients that disconnect, which are tested."""


class FaultyRegistry(Closeable):
    """Serve `models:1` until it is closed.

    Args:
        files: The artifact's files, by their paths in the store.
        tls: With a certificate; None for plain HTTP.

    Attributes:
        fault: What happens to whoever asks for a file: nothing, `hang`, `hang half way`, `missing`, `altered`, `cut`,
            `broken`; or to whoever asks for anything: `silent`.
        hanging: Set as long as somebody waits for what does not come.
    """

    def __init__(self, files: dict[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        self.fault = ""
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.blobs = {digest_of(content): content for content in files.values()}
        layers = [
            {"digest": digest_of(content), "size": len(content), "annotations": {TITLE: path}}
            for path, content in files.items()
        ]
        self.manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": layers}).encode()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def address(self) -> str:
        """Address of the artifact."""
        return f"oci://127.0.0.1:{self._server.server_address[1]}/models:1"

    def hang(self) -> None:
        """Let the client wait until the registry is closed."""
        self.hanging.set()
        self.released.wait()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(registry: FaultyRegistry) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if registry.fault == "silent":
                registry.hang()
                return
            kind, _, name = self.path.removeprefix("/v2/models/").partition("/")
            content = registry.manifest if kind == "manifests" else registry.blobs.get(name)
            fault = "" if kind == "manifests" else registry.fault
            if fault == "hang":
                registry.hang()
            elif content is None or fault == "missing":
                self._answer(404, b"")
            elif fault == "broken":
                self._answer(500, b"")
            else:
                self._answer(200, bytes(len(content)) if fault == "altered" else content, fault)

        def _answer(self, status: int, body: bytes, fault: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if fault in ("cut", "hang half way") else body)
            if fault == "hang half way":
                self.wfile.flush()
                registry.hang()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler
