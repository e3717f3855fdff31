"""gRPC of the load generator, against a server of grpcio and against one that breaks the rules."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import grpc
import pytest

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput, Overloaded, ProtocolError
from graphkiln_client import load_grpc
from graphkiln_client.load_grpc import GrpcSender, read_block
from graphkiln_client.transports.endpoint import Endpoint
from graphkiln_client.transports.grpc_wire import GrpcRequest

METHOD = "/test.Service/Call"


class Handler(grpc.GenericRpcHandler):
    """Answers with as many bytes as the request asks for, and keeps what it was sent."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.peers: set[str] = set()
        self.metadata: dict[str, str] = {}
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.answer = b""
        self.delay_s = 0.0

    def service(self, details: Any) -> Any:
        assert details.method == METHOD
        return grpc.unary_unary_rpc_method_handler(self.respond)

    def respond(self, request: bytes, context: Any) -> bytes:
        self.sizes.append(len(request))
        self.peers.add(context.peer())
        self.metadata = dict(context.invocation_metadata())
        time.sleep(self.delay_s)
        if self.refusal:
            context.abort(*self.refusal)
        return self.answer


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def endpoint(handler: Handler) -> Iterator[Endpoint]:
    options = [("grpc.max_receive_message_length", -1)]
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, handlers=[handler], options=options)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Endpoint.parse(f"grpc://127.0.0.1:{port}", {"X-Token": "t" * 300})
        server.stop(None).wait()


def request(size: int = 10) -> GrpcRequest:
    return GrpcRequest(method=METHOD, message=b"x" * size, parse=bytes)


@pytest.mark.parametrize("size", [0, 1, 1000, 16384, 65530, 70_000, 3_000_000])
@pytest.mark.parametrize("answered", [0, 1000, 3_000_000])
def test_messages_of_any_size(endpoint: Endpoint, handler: Handler, size: int, answered: int) -> None:
    handler.answer = b"y" * answered
    with GrpcSender(endpoint, 30) as sender:
        send = sender.repeatable(request(size))
        for _ in range(5):
            send()
    assert handler.sizes == [size] * 5
    assert len(handler.peers) == 1
    assert handler.metadata["x-token"] == "t" * 300


def test_each_thread_has_a_connection_for_all_its_requests(endpoint: Endpoint, handler: Handler) -> None:

    def work(sends: list[Callable[[], None]]) -> None:
        for _ in range(20):
            for send in sends:
                send()

    with GrpcSender(endpoint, 30) as sender:
        sends = [sender.repeatable(request(size)) for size in (1, 2, 3)]
        threads = [threading.Thread(target=work, args=(sends,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(handler.sizes) == 240
    assert len(handler.peers) == 4


@pytest.mark.parametrize(
    ("status", "kind"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded), (grpc.StatusCode.INVALID_ARGUMENT, InvalidInput)],
)
def test_refusals_are_the_clients_errors(
    endpoint: Endpoint, handler: Handler, status: grpc.StatusCode, kind: type[Exception]
) -> None:
    with GrpcSender(endpoint, 30) as sender:
        send = sender.repeatable(request())
        for _ in range(3):
            handler.refusal = (status, "no, 100% not: ä")
            with pytest.raises(kind, match=f"{status.name}: no, 100% not"):
                send()
            handler.refusal = None
            send()
    assert len(handler.peers) == 1


def test_a_server_that_is_silent(endpoint: Endpoint, handler: Handler) -> None:
    with GrpcSender(endpoint, 2.0) as sender:
        send = sender.repeatable(request())
        handler.delay_s = 3.0
        with pytest.raises(DeadlineExceeded, match="within 2 s"):
            send()
        handler.delay_s = 0.0
        send()
    assert len(handler.peers) == 2


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    send = GrpcSender(Endpoint.parse(f"grpc://127.0.0.1:{port}"), 5).repeatable(request())
    for _ in range(2):
        with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port} failed"):
            send()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload


STATUS = b"\x00\x0bgrpc-status\x01"


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([frame(4, 0, 0, b""), frame(6, 0, 0, b"12345678"), frame(1, 5, 1, STATUS + b"0")], None),
        (
            [frame(1, 4, 1, b"\x88"), frame(0, 0, 1, b"\0\0\0\0\0"), frame(1, 5, 1, b"\x3f\xe1\x1f" + STATUS + b"0")],
            None,
        ),
        ([frame(1, 1, 1, STATUS[:5]), frame(9, 4, 1, STATUS[5:] + b"0")], None),  # continued
        ([frame(1, 13, 1, b"\x02" + STATUS + b"0\0\0")], None),  # padded
        ([frame(1, 5, 1, STATUS + b"8\x00\x0cgrpc-message\x03a%20")], Overloaded),
        ([frame(1, 5, 1, b"\x88")], ProtocolError),
        ([frame(1, 5, 1, STATUS + b"x")], ProtocolError),
        ([frame(3, 0, 1, b"\0\0\0\1")], ConnectionFailed),
        ([frame(7, 0, 0, b"\0\0\0\0\0\0\0\0")], ConnectionFailed),
        ([frame(0, 0, 1, b"12345")[:-1]], ConnectionFailed),
        ([], ConnectionFailed),
    ],
)
def test_what_a_server_may_say(frames: list[bytes], error: type[Exception] | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(b"".join(frames))
                accepted.shutdown(socket.SHUT_WR)
                while accepted.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        expected = pytest.raises(error) if error else nullcontext()
        with GrpcSender(Endpoint.parse(f"grpc://127.0.0.1:{port}"), 10) as sender, expected:
            sender.repeatable(request())()
        thread.join()


def test_numbers_of_any_length() -> None:
    for number in (0, 1, 126, 127, 128, 254, 255, 300, 16_000, 5_000_000):
        assert load_grpc._read_number(load_grpc._number(number), 0, 7) == (number, len(load_grpc._number(number)))


def test_fields_that_are_written_out() -> None:
    block = b"\x88" + b"\x40" + b"\x01a\x02bc" + b"\x20" + b"\x0f\x01\x01x" + b"\x10" + b"\x01d\x81\xff" + STATUS + b"5"
    assert list(read_block(block)) == [("a", "bc"), ("d", ""), ("grpc-status", "5")]
