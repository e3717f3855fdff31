"""Servers with canned responses, right or wrong."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as pb

METADATA = b'{"name": "canned", "version": "1", "extensions": ["binary_tensor_data", "model_configuration"]}'
Answer = bytes | Callable[[socket.socket], None]


def http(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """Make an HTTP response; `length` replaces the true Content-Length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# A response to an inference: `Y` is `[2]`.
INFERRED = http(
    json.dumps({"model_name": "m", "outputs": [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [2]}]}).encode()
)

# The same over gRPC.
GRPC_INFERRED: bytes = pb.ModelInferResponse(
    model_name="m", outputs=[{"name": "Y", "datatype": "FP32", "shape": [1]}], raw_output_contents=[b"\0\0\0@"]
).SerializeToString()


def trickle(head: bytes, pause_s: float) -> Answer:
    """Send one byte at a time."""

    def send(connection: socket.socket) -> None:
        for byte in head:
            connection.sendall(bytes([byte]))
            time.sleep(pause_s)

    return send


def silence(connection: socket.socket) -> None:
    """Send nothing until the peer hangs up."""
    connection.recv(1)


def hang_up(_: socket.socket) -> None:
    """Close the connection without a response."""


class CannedHttp:
    """Answer GET /v2 correctly, and each other request with the next response; the last one repeats.

    Attributes:
        requests: Every request but GET /v2, as bytes.
        open_connections: How many connections are open now.
    """

    def __init__(self, answers: Sequence[Answer], *, context: ssl.SSLContext | None = None) -> None:
        self._answers = list(answers)
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        try:
            with suppress(OSError, ssl.SSLError):
                if self._context:
                    connection = self._context.wrap_socket(plain, server_side=True)
                while request := _read_request(connection):
                    if request.startswith(b"GET /v2 "):
                        connection.sendall(http(METADATA))
                        continue
                    self.requests.append(request)
                    answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                    if callable(answer):
                        answer(connection)
                        return
                    connection.sendall(answer)
        finally:
            self._connections.discard(plain)
            connection.close()


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more or more.startswith(b"\x16"):  # hung up, or a TLS handshake where none is expected
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    missing = int(lengths[0]) - len(body) if lengths else 0
    while missing > 0 and (more := connection.recv(65536)):
        data += more
        missing -= len(more)
    return data


class CannedGrpc:
    """Answer each call with the next response: bytes, a status with details, or seconds to wait."""

    def __init__(
        self,
        answers: Sequence[bytes | tuple[grpc.StatusCode, str] | float],
        *,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._answers = list(answers)
        self.methods: list[str] = []
        self.messages: list[bytes] = []
        self.metadata: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self._credentials = credentials
        address = "127.0.0.1:0"
        self.port = (
            self._server.add_secure_port(address, credentials)
            if credentials
            else self._server.add_insecure_port(address)
        )
        self._server.start()

    @property
    def url(self) -> str:
        return f"{'grpcs' if self._credentials else 'grpc'}://127.0.0.1:{self.port}"

    def service(self, details: Any) -> Any:
        """Implement grpcio's hook for every call."""
        return grpc.unary_unary_rpc_method_handler(lambda message, context: self._answer(details, message, context))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()

    def _answer(self, details: Any, message: bytes, context: Any) -> bytes:
        name = details.method.rpartition("/")[2]
        if name == "ServerMetadata":
            extensions = ["binary_tensor_data", "model_configuration"]
            return pb.ServerMetadataResponse(extensions=extensions).SerializeToString()
        if name == "ServerLive":
            return pb.ServerLiveResponse(live=True).SerializeToString()
        self.methods.append(name)
        self.messages.append(message)
        self.metadata.append(dict(details.invocation_metadata))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, tuple):
            context.abort(*answer)
        if isinstance(answer, float):
            time.sleep(answer)
            return b""
        return answer
