"""Servers that send too much: a typed error, in time, without using much memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from canned import Answer, CannedGrpc, CannedHttp, http
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import MIB
from graphkiln_client.transports import base as limits
from graphkiln_client.transports.base import VARIABLE, check_json, decompress, infer_limit

LIMIT_MIB = 16
CLIENT = Path(__file__).parents[3] / "support" / "hostile_client.py"


def endless(head: bytes, block: bytes) -> Answer:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(block)

    return send


def bomb(pack: Any) -> bytes:
    packed = pack.compress(bytes(256 << 20))
    return bytes(packed + pack.flush())


def inferred(**output: Any) -> bytes:
    row = {"name": "Y", "datatype": "FP32", "shape": [1], **output}
    return http(json.dumps({"model_name": "m", "outputs": [row]}).encode())


OK = b"HTTP/1.1 200 OK\r\n"
TOO_LARGE = "larger than"
HTTP: dict[str, tuple[Callable[[], Answer], str]] = {
    "a length of 10 GB": (lambda: endless(OK + b"Content-Length: 10000000000\r\n\r\n", bytes(1 << 16)), TOO_LARGE),
    "a length of 10^30": (lambda: endless(OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n", b"x"), "larger|HTTP"),
    "chunks": (
        lambda: endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(1 << 16) + b"\r\n"),
        TOO_LARGE,
    ),
    "no length": (lambda: endless(OK + b"\r\n", bytes(1 << 16)), TOO_LARGE),
    "headers": (lambda: endless(OK, b"X-Name: text\r\n" * 1000), "larger|HTTP"),
    "a header": (lambda: endless(OK + b"X-Name: ", b"x" * 10_000), "larger|HTTP"),
    "a status line": (lambda: endless(b"HTTP/1.1 200 ", b"x" * 10_000), "larger|HTTP"),
    "trailers": (
        lambda: endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Name: text\r\n" * 1000),
        "larger|HTTP|closed",
    ),
    "gzip": (lambda: http(bomb(zlib.compressobj(wbits=31)), "200 OK", "Content-Encoding: gzip"), TOO_LARGE),
    "deflate": (lambda: http(bomb(zlib.compressobj()), "200 OK", "Content-Encoding: deflate"), TOO_LARGE),
    "members": (lambda: http(gzip.compress(b"") * 100_000, "200 OK", "Content-Encoding: gzip"), TOO_LARGE),
    "deep JSON": (lambda: http(b'{"outputs":' * 100_000), "is not JSON"),
    "deep lists": (lambda: http(b"[" * 100_000), "is not JSON"),
    "many lists": (lambda: http(b"[" + b"[]," * 5_000_000 + b"[]]"), "more than 4000000 lists"),
    "a huge number": (lambda: http(b"9" * 1_000_000), "is not JSON"),
    "a huge shape": (lambda: inferred(shape=[1 << 40], data=[1.0]), "are not a FP32 tensor"),
    "a wrong size": (lambda: inferred(shape=[1 << 62, 4], parameters={"binary_data_size": 4}), "ends after|not a"),
    "a shape of a thousand": (lambda: inferred(shape=[1] * 1000, data=[1.0]), "invalid shape"),
    "a datatype of a megabyte": (lambda: inferred(datatype="x" * (1 << 20), data=[1]), "unknown datatype"),
    "a reason of a megabyte": (lambda: http(b"x" * (1 << 20), "500 Oops"), "the server returned 500"),
}


def raw(shape: list[int], size: int, datatype: str = "FP32") -> bytes:
    output = {"name": "Y", "datatype": datatype, "shape": shape}
    message = pb.ModelInferResponse(model_name="m", outputs=[output], raw_output_contents=[bytes(size)])
    return bytes(message.SerializeToString())


GRPC: dict[str, tuple[Callable[[], bytes], str]] = {
    "a large message": (lambda: raw([1], 64 << 20), TOO_LARGE),
    "a huge shape": (lambda: raw([1 << 40], 4), "4 bytes are not a FP32 tensor"),
    "a shape of a thousand": (lambda: raw([1] * 1000, 4), "invalid shape"),
    "a negative shape": (lambda: raw([-1], 4), "invalid shape"),
    "an unknown datatype": (lambda: raw([1], 4, "x" * (1 << 20)), "unknown datatype"),
    "a text that is cut short": (lambda: raw([1], 3, "BYTES"), "are not a BYTES tensor"),
    "no message": (lambda: b"\xff" * 100, "is damaged"),
    "deep groups": (lambda: b"\x0b" * 100_000, "is damaged"),
}


def ask(urls: list[str]) -> list[dict[str, Any]]:
    """Run the blocking and the asynchronous client in a subprocess and return their reports."""
    environment = {**os.environ, VARIABLE: str(LIMIT_MIB)}
    finished = subprocess.run(
        [sys.executable, CLIENT, *urls], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def check(reports: list[dict[str, Any]], kinds: dict[str, Any], urls: dict[str, str]) -> None:
    by_url = {url: name for name, url in urls.items()}
    assert len(reports) == 2 * len(urls)
    for report in reports:
        name = by_url[report["url"]]
        assert re.search(kinds[name][1], report["says"]), (name, report)
        assert len(report["says"]) < 3000, name
        assert report["kib"] < 12 * LIMIT_MIB << 10, (name, report)
        assert report["error"] in ("ProtocolError", "ServerError", "ConnectionFailed"), (name, report)


def test_over_http() -> None:
    with ExitStack() as stack:
        urls = {name: stack.enter_context(CannedHttp([make()])).url for name, (make, _) in HTTP.items()}
        check(ask([*urls.values()]), HTTP, urls)


def test_over_grpc() -> None:
    with ExitStack() as stack:
        urls = {name: stack.enter_context(CannedGrpc([make()])).url for name, (make, _) in GRPC.items()}
        check(ask([*urls.values()]), GRPC, urls)


def test_too_large_response_is_not_retried(monkeypatch: pytest.MonkeyPatch, infer: Any) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with CannedGrpc([raw([1 << 19], 1 << 21)]) as server:
        with pytest.raises(ProtocolError, match=rf"larger than 1 MiB .*{VARIABLE}"):
            infer(server.url)
        assert server.methods == ["ModelInfer"]


def test_errors_show_no_headers(infer: Any) -> None:
    with CannedHttp([endless(OK, b"X-Name: text\r\n" * 1000)]) as server:
        with pytest.raises(ProtocolError) as caught:
            infer(server.url, headers={"Authorization": "Bearer secret"})
        assert "secret" not in str(caught.value)


class TestInferLimit:
    def test_infer_limit_from_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert infer_limit() == 256 * MIB
        monkeypatch.setenv(limits.VARIABLE, "3")
        assert infer_limit() == 3 * MIB

    @pytest.mark.parametrize("text", ["0", "x", "9" * 30])
    def test_invalid_infer_limit(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv(limits.VARIABLE, text)
        with pytest.raises(InvalidInput, match=f"{limits.VARIABLE} must be a number of MiB"):
            infer_limit()


class TestDecompress:
    @pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    def test_decompression_limit(self, encoding: str, pack: object) -> None:
        assert callable(pack)
        assert decompress(pack(bytes(100)), encoding, 100) == bytes(100)
        with pytest.raises(ProtocolError, match="larger than 99 bytes"):
            decompress(pack(bytes(100)), encoding, 99)

    def test_several_members_and_padding(self) -> None:
        assert decompress(gzip.compress(b"a") + gzip.compress(b"b") + bytes(9), "gzip", 2) == b"ab"
        with pytest.raises(ProtocolError, match="larger than"):
            decompress(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 1)

    def test_truncated_gzip(self) -> None:
        with pytest.raises(ProtocolError, match="decompressed as gzip"):
            decompress(gzip.compress(bytes(1000))[:-9], "gzip", 1000)


class TestJson:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [(b"[" * 4_000_001, "more than 4000000 lists"), (bytes(64 * MIB + 1), "larger than 64 MiB")],
    )
    def test_json_limits(self, body: bytes, reason: str) -> None:
        with pytest.raises(ProtocolError, match=reason):
            check_json(body)
