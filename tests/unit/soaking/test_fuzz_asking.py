"""What the fuzzer takes for a right answer, and what for none."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from soaking.fuzz_asking import check_stream
from soaking.fuzz_grpc import GrpcCase
from soaking.fuzz_raw import exchange
from soaking.fuzz_streams import StreamCase
from soaking.ledger import WrongAnswer
from soaking.models import MODELS_BY_NAME

FIXED = MODELS_BY_NAME["fixed"]
FEEDS = {"x": np.float32([[1, 2, 3]])}
CASE = GrpcCase(kind="gRPC valid", method="", body=b"", model=FIXED, feeds=FEEDS)
STREAM = StreamCase(kind="stream", bodies=(b"", b""), valid=(CASE, CASE))


def answer(number: int, added: float = 1.0) -> bytes:
    response: Any = service_pb2.ModelInferResponse(model_name="fixed", model_version="1", id=str(number))
    response.outputs.add(name="y", datatype="FP32", shape=[1, 3])
    response.raw_output_contents.append((FEEDS["x"] + np.float32(added)).tobytes())
    serialized: bytes = service_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()
    return serialized


def test_the_answers_of_a_stream_may_come_in_any_order() -> None:
    check_stream(STREAM, [answer(1), answer(0)])


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([answer(0)], "got answers"),
        ([answer(0), answer(0)], "got answers"),
        ([answer(0), answer(1, added=2.0)], "fixed version 1: y is"),
        ([service_pb2.ModelStreamInferResponse(error_message="no").SerializeToString()], "a valid stream got: no"),
    ],
)
def test_a_stream_that_is_not_answered_rightly(contents: list[bytes], words: str) -> None:
    with pytest.raises(WrongAnswer, match=words):
        check_stream(STREAM, contents)


@pytest.mark.parametrize(
    ("response", "status"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "400"), (b"\x00\x00\x12", "other bytes"), (b"", "closed")],
)
def test_what_comes_back_over_a_bare_connection(response: bytes, status: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=lambda: (theirs.recv(100), theirs.sendall(response), theirs.close())).start()
        assert exchange(ours, b"POST") == status
