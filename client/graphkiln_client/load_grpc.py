"""gRPC for the load generator: one request after the other on a connection of one's own, in a tenth of grpcio's time.

grpcio takes 0.3 ms of the caller's processor for each call, which would count as the server's latency. A unary call is
three frames that can be made beforehand; of the response, the generator reads no more than how it ended. Only for
connections without TLS. The client itself does not use this: its calls stay grpcio's.

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK); gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import grpc

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, ProtocolError
from graphkiln_backend.system.closing import Closeable
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.grpc_wire import GrpcRequest, grpc_error

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY, _ACK = 1, 4, 8, 32, 1
_TABLE_SIZE, _PUSH, _INITIAL_WINDOW, _FRAME_SIZE = 1, 2, 4, 5
_MOST = (1 << 31) - 1
_DEFAULT_WINDOW = 65535
_DEFAULT_FRAME = 16384
_LAST_STREAM = _MOST - 2
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STATUSES = {status.value[0]: status for status in grpc.StatusCode}


class GrpcSender(Closeable):
    """Sends requests and waits for their responses; each thread has a connection of its own.

    Args:
        endpoint: The server, without TLS.
        timeout_s: Seconds that it may be silent.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._connections: list[GrpcConnection] = []

    def repeatable(self, request: GrpcRequest) -> Callable[[], None]:
        """A function that sends a request; it raises the `ClientError` family only."""
        block = _header_block(self._endpoint, request)
        return lambda: self._send(request, block)

    def close(self) -> None:
        """Closes all connections, when no thread sends any more."""
        for connection in self._connections:
            connection.close()

    def _send(self, request: GrpcRequest, block: bytes) -> None:
        connection: GrpcConnection | None = getattr(self._local, "connection", None)
        try:
            if connection is None:
                connection = self._local.connection = GrpcConnection(self._endpoint, self._timeout_s)
                self._connections.append(connection)
            connection.call(request, block)
        except TimeoutError as error:
            self._forget(connection)
            raise DeadlineExceeded(f"{self._endpoint} did not respond within {self._timeout_s:g} s") from error
        except OSError as error:
            self._forget(connection)
            raise ConnectionFailed(f"the connection to {self._endpoint} failed: {error}") from error

    def _forget(self, connection: GrpcConnection | None) -> None:
        if connection:
            connection.close()
        self._local.connection = None


class GrpcConnection:
    """One HTTP/2 connection with one call at a time.

    Args:
        endpoint: The server.
        timeout_s: Seconds that it may be silent.

    Raises:
        OSError: It cannot be reached.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._socket = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb", 1 << 18)
        self._stream = -1
        self._window = _DEFAULT_WINDOW
        self._stream_window = self._initial_window = _DEFAULT_WINDOW
        self._frame_size = _DEFAULT_FRAME
        self._received = 0
        # Without a table, the server's headers can be read without those before them.
        settings = {_TABLE_SIZE: 0, _PUSH: 0, _INITIAL_WINDOW: _MOST, _FRAME_SIZE: (1 << 24) - 1}
        values = b"".join(struct.pack(">HI", *setting) for setting in settings.items())
        grown = struct.pack(">I", _MOST - _DEFAULT_WINDOW)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, values) + _frame(_WINDOW, 0, 0, grown))

    def call(self, request: GrpcRequest, block: bytes) -> None:
        """Sends a request, and its block of headers, and waits for the end of its response.

        Raises:
            OSError: The connection broke, or the server was silent too long.
            ClientError: The server refused the request.
        """
        self._stream += 2
        if self._stream > _LAST_STREAM:
            raise ConnectionResetError("all streams are used")
        self._stream_window = self._initial_window
        parts = [_frame(_HEADERS, _END_HEADERS, self._stream, block)]
        message = memoryview(b"\0" + struct.pack(">I", len(request.message)) + request.message)
        trailers = None
        while message and trailers is None:
            size = min(len(message), self._window, self._stream_window, self._frame_size)
            if size:
                parts += (_frame(_DATA, _END_STREAM * (size == len(message)), self._stream, message[:size]),)
                message = message[size:]
                self._window -= size
                self._stream_window -= size
                continue
            self._flush(parts)
            trailers = self._read_frame()
        self._flush(parts)
        while trailers is None:
            trailers = self._read_frame()
        _check(trailers, request)

    def close(self) -> None:
        """Closes the connection."""
        self._reader.close()
        self._socket.close()

    def _flush(self, parts: list[bytes]) -> None:
        if parts:
            self._socket.sendall(b"".join(parts))
            parts.clear()

    def _read_frame(self) -> bytes | None:
        """The block of headers that ends this call's stream; None for any other frame."""
        kind, flags, stream, payload = self._receive()
        if kind == _HEADERS:
            block = _unpad(payload, flags)
            while not flags & _END_HEADERS:
                kind, more, _, payload = self._receive()
                flags |= more & _END_HEADERS
                block += payload
            return block if flags & _END_STREAM and stream == self._stream else None
        if kind == _DATA:
            self._count(len(payload))
        elif kind == _WINDOW:
            self._widen(stream, struct.unpack(">I", payload)[0] & _MOST)
        elif kind == _SETTINGS and not flags & _ACK:
            self._apply(payload)
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY or (kind == _RESET and stream == self._stream):
            raise ConnectionResetError("the server ended the call" if kind == _RESET else "the server is going away")
        return None

    def _receive(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        stream = struct.unpack(">I", head[5:])[0] & _MOST
        return head[3], head[4], stream, self._read(int.from_bytes(head[:3], "big"))

    def _read(self, size: int) -> bytes:
        data: bytes = self._reader.read(size)
        if len(data) < size:
            raise ConnectionResetError("the server closed the connection")
        return data

    def _count(self, size: int) -> None:
        """Lets the server send as much again, long before it would have to wait."""
        self._received += size
        if self._received > _MOST // 4:
            self._socket.sendall(_frame(_WINDOW, 0, 0, struct.pack(">I", self._received)))
            self._received = 0

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            self._window += size
        elif stream == self._stream:
            self._stream_window += size

    def _apply(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _INITIAL_WINDOW:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif key == _FRAME_SIZE:
                self._frame_size = value
        self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    return b"".join((len(payload).to_bytes(3, "big"), bytes((kind, flags)), struct.pack(">I", stream), payload))


def _unpad(payload: bytes, flags: int) -> bytes:
    if flags & _PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload[5:] if flags & _PRIORITY else payload


def _header_block(endpoint: Endpoint, request: GrpcRequest) -> bytes:
    """The headers, none of them compressed: nothing depends on the requests before."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": request.method, ":authority": endpoint.authority,
        "te": "trailers", "content-type": "application/grpc", "user-agent": "graphkiln-bench",
        **{name.lower(): value for name, value in endpoint.headers.items()},
    }  # fmt: skip
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    return _number(len(data)) + data


def _number(number: int) -> bytes:
    """With a prefix of seven bits. Source: RFC 7541, 5.1."""
    if number < 127:
        return bytes((number,))
    groups, number = bytearray(b"\x7f"), number - 127
    while number >= 128:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _check(trailers: bytes, request: GrpcRequest) -> None:
    """Raises what the trailers say, unless they say OK."""
    if b"grpc-status\x010" in trailers:
        return
    fields = dict(read_block(trailers))
    status = fields.get("grpc-status", "")
    if not status.isdecimal() or int(status) not in _STATUSES:
        raise ProtocolError(f"the response to {request.method} has no status that gRPC knows")
    error: ClientError = grpc_error(_STATUSES[int(status)], unquote(fields.get("grpc-message", "")), request.request_id)
    raise error


def read_block(block: bytes) -> Iterator[tuple[str, str]]:
    """The fields of a block of headers that are written out; what is compressed by Huffman's code is left out.

    Source: RFC 7541, 6.
    """
    position = 0
    while position < len(block):
        first = block[position]
        bits = 7 if first & 128 else 6 if first & 64 else 5 if first & 32 else 4
        index, position = _read_number(block, position, bits)
        if bits in (7, 5):  # of the static table, or a new size of the other one
            continue
        name, position = ("", position) if index else _read_text(block, position)
        value, position = _read_text(block, position)
        if name:
            yield name, value


def _read_text(block: bytes, position: int) -> tuple[str, int]:
    is_compressed = block[position] & 128
    size, position = _read_number(block, position, 7)
    text = "" if is_compressed else block[position : position + size].decode("latin-1")
    return text, position + size


def _read_number(block: bytes, position: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    number = block[position] & limit
    position += 1
    shift = 0
    while number >= limit:
        group = block[position]
        position += 1
        number += (group & 127) << shift
        shift += 7
        if group < 128:
            break
    return number, position
