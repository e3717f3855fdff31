"""HTTP transports with faulty servers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from canned import INFERRED, CannedHttp, hang_up, http, silence, trickle

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_client import Client

X = {"X": np.arange(3, dtype=np.float32)}
Infer = Callable[..., dict[str, AnyArray]]


class TestHttp:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            ("400 Bad Request", InvalidInput),
            ("401 Unauthorized", Unauthorized),
            ("403 Forbidden", Unauthorized),
            ("404 Not Found", ModelNotFound),
            ("429 Too Many Requests", Overloaded),
            ("499 Client Closed Request", DeadlineExceeded),
            ("500 Internal Server Error", ServerError),
            ("502 Bad Gateway", ConnectionFailed),
            ("503 Service Unavailable", ModelNotReady),
            ("504 Gateway Timeout", ConnectionFailed),
            ("302 Found", ServerError),
        ],
    )
    def test_status_to_error(self, infer: Infer, status: str, kind: type[ClientError]) -> None:
        answer = http(b'{"error": "because"}', status, "Retry-After: 7", "Location: /elsewhere")
        with CannedHttp([answer]) as server:
            with pytest.raises(kind, match="because") as caught:
                infer(server.url, max_retries=0)
            assert type(caught.value) is kind
            assert caught.value.status == int(status[:3])
            assert caught.value.body == '{"error": "because"}'
            assert caught.value.retry_after_s == 7
            assert len(caught.value.request_id or "") == 32
            assert len(server.requests) == 1, "redirects are not followed"

    def test_connection_refused(self, infer: Infer) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionFailed, match=r"cannot reach http://127\.0\.0\.1") as caught:
                infer(f"http://127.0.0.1:{held.getsockname()[1]}", max_retries=0)
        assert "graphkiln health" in caught.value.hint

    def test_path_prefix(self, infer: Infer) -> None:
        with CannedHttp([http(b'{"extensions": ["binary_tensor_data"]}'), INFERRED]) as server:
            infer(f"{server.url}/gateway/a%20b")
            assert server.requests[-1].startswith(b"POST /gateway/a%20b/v2/models/m/infer HTTP/1.1\r\n")

    @pytest.mark.parametrize(
        ("answer", "kind", "words"),
        [
            (b"\x00\x01\x02 nothing like HTTP\r\n\r\n", ProtocolError, "does not speak HTTP"),
            (b"HTTP/1.1 banana\r\n\r\n", ProtocolError, "does not speak HTTP"),
            (http(b"{}"), ProtocolError, "malformed: KeyError"),
            (http(b"{}", "200 OK", "Content-Encoding: gzip"), ProtocolError, "decompressed as gzip"),
            (http(b"{}", "200 OK", "Inference-Header-Content-Length: 999"), ProtocolError, "declares 999 bytes"),
            (hang_up, ConnectionFailed, "closed the connection|cannot reach"),
        ],
    )
    def test_garbage(self, infer: Infer, answer: Any, kind: type[ClientError], words: str) -> None:
        with CannedHttp([answer]) as server, pytest.raises(kind, match=words):
            infer(server.url, max_retries=0)

    def test_truncated_response(self, infer: Infer) -> None:
        def cut(connection: Any) -> None:
            connection.sendall(http(b"{}", length=50))

        with CannedHttp([cut]) as server, pytest.raises(ConnectionFailed, match="closed the connection"):
            infer(server.url, max_retries=0)

    def test_short_content_length_affects_one_response(self) -> None:
        with CannedHttp([http(b'{"outputs": []}', length=2), INFERRED]) as server, Client(server.url) as client:
            with pytest.raises(ProtocolError):
                client.model("m").infer(X)
            assert client.model("m").infer(X)["Y"] == [2]

    @pytest.mark.parametrize("answer", [silence, trickle(INFERRED, 0.05)], ids=["silent", "trickling"])
    def test_deadline_covers_whole_response(self, infer: Infer, answer: Any) -> None:
        begun = time.monotonic()
        with CannedHttp([answer]) as server:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.4 s"):
                infer(server.url, timeout_s=0.4)
            assert time.monotonic() - begun < 20
            assert len(server.requests) == 1, "a deadline is not tried again"

    def test_unexpected_response_is_dropped(self) -> None:
        with (
            CannedHttp([INFERRED + INFERRED.replace(b"[2]", b"[7]"), INFERRED]) as server,
            Client(server.url) as client,
        ):
            assert [client.model("m").infer(X)["Y"].tolist() for _ in range(3)] == [[2]] * 3

    def test_headers_are_sent_and_not_shown(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "401 No"), INFERRED]) as server:
            options: dict[str, Any] = {"headers": {"Authorization": "Bearer s3cret"}}
            with pytest.raises(Unauthorized) as caught:
                infer(server.url, **options)
            assert b"authorization: bearer s3cret" in server.requests[0].lower()
            assert "s3cret" not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
            client = Client(server.url.replace("//", "//me:s3cret@"), **options)
            assert "s3cret" not in f"{client!r} {vars(client)}"
            client.close()

    def test_remaining_time_is_sent(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "503 Later"), INFERRED]) as server:
            infer(server.url, timeout_s=10)
            told = [
                json.loads(r.partition(b"\r\n\r\n")[2].partition(b"\x00")[0][: _header(r)])["parameters"]["timeout"]
                for r in server.requests
            ]
            assert 10e6 > told[0] > told[1] > 5e6

    @pytest.mark.parametrize("compression", ["gzip", "deflate"])
    def test_compressed_responses(self, infer: Infer, compression: Any) -> None:
        import gzip
        import zlib

        body = INFERRED.partition(b"\r\n\r\n")[2]
        packed = gzip.compress(body) if compression == "gzip" else zlib.compress(body)
        with CannedHttp([http(packed, "200 OK", f"Content-Encoding: {compression}")]) as server:
            assert infer(server.url, compression=compression)["Y"] == [2]
            assert f"content-encoding: {compression}".encode() in server.requests[0].lower()
            assert b'"inputs"' not in server.requests[0]


def _header(request: bytes) -> int:
    lines = request.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in lines if line.startswith(b"inference-header-content-length"))


class TestProxies:
    def test_http_proxy(self, infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
        with CannedHttp([INFERRED]) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:pass@"))
            monkeypatch.setattr("canned.METADATA", b"{}")
            # A proxy sees the whole URL, so its GET /v2 is a request like any other here.
            proxy._answers = [http(b'{"extensions": ["binary_tensor_data"]}'), INFERRED]
            assert infer("http://far.away:8000")["Y"] == [2]
            assert proxy.requests[1].startswith(b"POST http://far.away:8000/v2/models/m/infer HTTP/1.1")
            assert b"Proxy-Authorization: Basic bWU6cGFzcw==" in proxy.requests[1]

    def test_no_proxy_for_localhost(self, infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        with CannedHttp([INFERRED]) as server:
            assert infer(server.url, max_retries=0)["Y"] == [2]
