"""What the clients make of servers that misbehave: the right error, in time, with nothing left open."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from canned import CannedGrpc, CannedHttp, hang_up, http, silence, trickle
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

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
from graphkiln_client import AsyncClient, Client

X = {"X": np.arange(3, dtype=np.float32)}
GOOD = http(
    json.dumps({"model_name": "m", "outputs": [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [2]}]}).encode()
)
Infer = Callable[..., dict[str, AnyArray]]


def infer_blocking(url: str, inputs: Mapping[str, AnyArray] = X, **options: Any) -> dict[str, AnyArray]:
    with Client(url, **options) as client:
        return client.model("m").infer(inputs)


def infer_async(url: str, inputs: Mapping[str, AnyArray] = X, **options: Any) -> dict[str, AnyArray]:
    async def ask() -> dict[str, AnyArray]:
        async with AsyncClient(url, **options) as client:
            return await client.model("m").infer(inputs)

    return asyncio.run(ask())


@pytest.fixture(params=[infer_blocking, infer_async], ids=["blocking", "async"])
def infer(request: pytest.FixtureRequest) -> Infer:
    chosen: Infer = request.param
    return chosen


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
        with CannedHttp([http(b'{"error": "because"}', status, "Retry-After: 7")]) as server:
            with pytest.raises(kind, match="because") as caught:
                infer(server.url, max_retries=0)
            assert type(caught.value) is kind
            assert caught.value.status == int(status[:3])
            assert caught.value.body == '{"error": "because"}'
            assert caught.value.retry_after_s == 7
            assert len(caught.value.request_id or "") == 32
            assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("answer", "kind", "words"),
        [
            (b"\x00\x01\x02 nothing like HTTP\r\n\r\n", ProtocolError, "does not answer in HTTP"),
            (b"HTTP/1.1 banana\r\n\r\n", ProtocolError, "does not answer in HTTP"),
            (http(b"<html>"), ProtocolError, "not JSON"),
            (http(b"[]"), ProtocolError, "not a JSON object"),
            (http(b"[" * 100_000), ProtocolError, "not JSON"),
            (http(b"{}"), ProtocolError, "lacks or spoils 'outputs'"),
            (http(b"{}", "200 OK", "Content-Encoding: gzip"), ProtocolError, "decompressed as gzip"),
            (http(b"{}", "200 OK", "Content-Encoding: br"), ProtocolError, "decompressed as br"),
            (http(b'{"id": "of another", "outputs": []}'), ProtocolError, "answered with id of another"),
            (http(b"{}", "200 OK", "Inference-Header-Content-Length: 999"), ProtocolError, "header has 999 bytes"),
            (http(b"{}", "200 OK", f"Inference-Header-Content-Length: {'9' * 5000}"), ProtocolError, "lacks"),
            (hang_up, ConnectionFailed, "broke off|cannot reach"),
        ],
    )
    def test_garbage(self, infer: Infer, answer: Any, kind: type[ClientError], words: str) -> None:
        with CannedHttp([answer]) as server, pytest.raises(kind, match=words):
            infer(server.url, max_retries=0)

    def test_an_answer_that_ends_early(self, infer: Infer) -> None:
        def cut(connection: Any) -> None:
            connection.sendall(http(b"{}", length=50))

        with CannedHttp([cut]) as server, pytest.raises(ConnectionFailed, match="broke off"):
            infer(server.url, max_retries=0)

    def test_a_length_beyond_all_memory_waits_for_no_byte_of_it(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", length=10**15)]) as server, pytest.raises(ClientError):
            infer(server.url, max_retries=0, timeout_s=0.5)

    def test_a_length_that_is_too_short_spoils_one_answer_not_the_next(self) -> None:
        with CannedHttp([http(b'{"outputs": []}', length=2), GOOD]) as server, Client(server.url) as client:
            with pytest.raises(ProtocolError):
                client.model("m").infer(X)
            assert client.model("m").infer(X)["Y"] == [2]

    @pytest.mark.parametrize("answer", [silence, trickle(GOOD, 0.05)], ids=["silent", "trickling"])
    def test_the_deadline_is_for_the_whole_answer(self, infer: Infer, answer: Any) -> None:
        begun = time.monotonic()
        with CannedHttp([answer]) as server:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.4 s"):
                infer(server.url, timeout_s=0.4)
            assert time.monotonic() - begun < 2
            assert len(server.requests) == 1, "a deadline is not tried again"

    def test_time_that_has_passed_is_not_given_again(self, infer: Infer) -> None:
        def half(connection: Any) -> None:
            time.sleep(0.8)
            connection.sendall(GOOD[:20])
            silence(connection)

        begun = time.monotonic()
        with CannedHttp([half]) as server:
            with pytest.raises(DeadlineExceeded):
                infer(server.url, timeout_s=1.0)
            assert time.monotonic() - begun < 1.6

    def test_an_answer_too_many_is_nobodys(self) -> None:
        with CannedHttp([GOOD + GOOD.replace(b"[2]", b"[7]"), GOOD]) as server, Client(server.url) as client:
            assert [client.model("m").infer(X)["Y"].tolist() for _ in range(3)] == [[2]] * 3

    def test_nothing_is_left_open(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "500 Oh")]) as server:
            with pytest.raises(ServerError):
                infer(server.url)
            deadline = time.monotonic() + 5
            while server.open_connections and time.monotonic() < deadline:
                time.sleep(0.01)
            assert server.open_connections == 0

    def test_connections_are_used_again(self) -> None:
        with CannedHttp([GOOD]) as server, Client(server.url) as client:
            for _ in range(5):
                client.model("m").infer(X)
            assert server.open_connections == 1

    def test_headers_are_sent_and_never_shown(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "401 No"), GOOD]) as server:
            options: dict[str, Any] = {"headers": {"Authorization": "Bearer s3cret"}}
            with pytest.raises(Unauthorized) as caught:
                infer(server.url, **options)
            assert b"authorization: bearer s3cret" in server.requests[0].lower()
            assert "s3cret" not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
            client = Client(server.url.replace("//", "//me:s3cret@"), **options)
            assert "s3cret" not in f"{client!r} {vars(client)}"
            client.close()

    def test_credentials_in_the_url_become_a_header(self, infer: Infer) -> None:
        with CannedHttp([GOOD]) as server:
            infer(server.url.replace("//", "//me:pass@"))
            assert b"Authorization: Basic bWU6cGFzcw==" in server.requests[0]

    @pytest.mark.parametrize("headers", [{"X-A": "a\r\nX-B: b"}, {"X A": "a"}, {"X-A": "\u00e4"}])
    def test_a_header_that_would_be_two_is_refused(self, headers: dict[str, str]) -> None:
        with pytest.raises(InvalidInput, match="header"):
            Client("http://x", headers=headers)

    def test_a_server_without_the_binary_extension_gets_json(
        self, infer: Infer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("canned.METADATA", b'{"name": "plain", "extensions": []}')
        with CannedHttp([GOOD]) as server:
            feeds = {"X": np.array([1.5]), "T": np.array(["a", b"b"], np.object_), "B": np.array([True])}
            assert infer(server.url, feeds)["Y"] == [2]
            body = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
            assert [row["data"] for row in body["inputs"]] == [[1.5], ["a", "b"], [True]]
            for unfit in (np.zeros(1, np.float16), np.array([b"\xff"], np.object_), np.array([np.nan])):
                with pytest.raises(InvalidInput, match="JSON"):
                    infer(server.url, {"X": unfit})

    def test_the_server_is_told_what_is_left_of_the_time(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "503 Later"), GOOD]) as server:
            infer(server.url, timeout_s=10)
            told = [
                json.loads(r.partition(b"\r\n\r\n")[2].partition(b"\x00")[0][: _header(r)])["parameters"]["timeout"]
                for r in server.requests
            ]
            assert 10e6 > told[0] > told[1] > 5e6

    @pytest.mark.parametrize("compression", ["gzip", "deflate"])
    def test_answers_may_be_compressed(self, infer: Infer, compression: Any) -> None:
        import gzip
        import zlib

        body = GOOD.partition(b"\r\n\r\n")[2]
        packed = gzip.compress(body) if compression == "gzip" else zlib.compress(body)
        with CannedHttp([http(packed, "200 OK", f"Content-Encoding: {compression}")]) as server:
            assert infer(server.url, compression=compression)["Y"] == [2]
            assert f"content-encoding: {compression}".encode() in server.requests[0].lower()
            assert b'"inputs"' not in server.requests[0]


def _header(request: bytes) -> int:
    lines = request.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in lines if line.startswith(b"inference-header-content-length"))


def test_a_region_that_could_not_be_made_anew_is_not_used_again() -> None:
    """The server has forgotten the region, and cannot take another one at once."""
    metadata = http(b'{"name": "m", "inputs": [], "outputs": []}')
    done = http(b"{}")
    answers = [metadata, done, http(b"{}", "400 Bad"), http(b"{}", "404 No"), done, http(b"{}", "500 Oh"), done, GOOD]
    with CannedHttp(answers) as server, Client(server.url) as client, client.shared_memory() as shared:
        model = shared.model("m")
        with pytest.raises(ServerError):
            model.infer(X)
        assert model.infer(X)["Y"] == [2]


class TestProxies:
    def test_the_environments_proxy_is_asked(self, infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
        with CannedHttp([GOOD]) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:pass@"))
            monkeypatch.setattr("canned.METADATA", b"{}")
            # A proxy sees the whole URL, so its GET /v2 is a request like any other here.
            proxy._answers = [http(b'{"extensions": ["binary_tensor_data"]}'), GOOD]
            assert infer("http://far.away:8000")["Y"] == [2]
            assert proxy.requests[1].startswith(b"POST http://far.away:8000/v2/models/m/infer HTTP/1.1")
            assert b"Proxy-Authorization: Basic bWU6cGFzcw==" in proxy.requests[1]

    def test_but_not_for_hosts_that_the_environment_excepts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with CannedHttp([GOOD]) as server:
            assert infer_blocking(server.url)["Y"] == [2]


class TestRetries:
    @pytest.mark.parametrize("status", ["429 Busy", "502 Bad", "503 Later", "504 Slow"])
    def test_what_may_pass_is_tried_again(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), http(b"{}", status), GOOD]) as server:
            assert infer(server.url)["Y"] == [2]
            assert len(server.requests) == 3

    def test_a_broken_connection_is_tried_again(self, infer: Infer) -> None:
        with CannedHttp([hang_up, GOOD]) as server:
            assert infer(server.url)["Y"] == [2]

    @pytest.mark.parametrize("status", ["400 Bad", "401 Who", "404 No", "500 Oh"])
    def test_what_is_final_is_not(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), GOOD]) as server:
            with pytest.raises(ClientError):
                infer(server.url)
            assert len(server.requests) == 1

    def test_no_more_often_than_asked(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "503 Later")]) as server:
            with pytest.raises(ModelNotReady):
                infer(server.url, max_retries=3)
            assert len(server.requests) == 4

    def test_the_server_says_when(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 1"), GOOD]) as server:
            infer(server.url)
        assert time.monotonic() - begun >= 1

    def test_waiting_beyond_the_deadline_is_not_begun(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 60")]) as server, pytest.raises(Overloaded):
            infer(server.url, timeout_s=2)
        assert time.monotonic() - begun < 1.5


class TestTls:
    def context(self, authority: trustme.CA, **options: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", **options).configure_cert(context)
        return context

    def test_a_trusted_server_is_asked(self, infer: Infer, tmp_path: Any) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        with CannedHttp([GOOD], context=self.context(authority)) as server:
            assert infer(server.url, ca_file=tmp_path / "ca.pem")["Y"] == [2]
            with pytest.raises(ConnectionFailed, match="cannot trust"):
                infer(server.url, max_retries=0)

    def test_an_expired_certificate_is_not_trusted(self, infer: Infer, tmp_path: Any) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        context = self.context(authority, not_before=past, not_after=past + datetime.timedelta(days=1))
        with CannedHttp([GOOD], context=context) as server, pytest.raises(ConnectionFailed, match="expired"):
            infer(server.url, ca_file=tmp_path / "ca.pem", max_retries=0)

    def test_a_server_without_tls(self, infer: Infer) -> None:
        with (
            CannedHttp([GOOD]) as server,
            pytest.raises(ConnectionFailed, match=r"does not speak TLS|broke off|cannot reach https"),
        ):
            infer(server.url.replace("http", "https"), max_retries=0)

    @pytest.mark.parametrize("days", [1, -1])
    def test_grpc_trusts_whom_http_trusts(self, infer: Infer, tmp_path: Any, days: int) -> None:
        authority, now = trustme.CA(), datetime.datetime.now(datetime.UTC)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        ends = now + datetime.timedelta(days=days)
        issued = authority.issue_cert("127.0.0.1", not_before=now - datetime.timedelta(days=9), not_after=ends)
        pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
        with CannedGrpc([GRPC_GOOD], credentials=grpc.ssl_server_credentials([pair])) as server:
            if days > 0:
                assert infer(server.url, ca_file=tmp_path / "ca.pem")["Y"] == [2]
                with pytest.raises(ConnectionFailed, match="cannot reach grpcs"):
                    infer(server.url, max_retries=0)
            else:
                with pytest.raises(ConnectionFailed, match="expired"):
                    infer(server.url, ca_file=tmp_path / "ca.pem", max_retries=0)

    def test_a_ca_file_that_is_none(self, tmp_path: Any) -> None:
        (tmp_path / "ca.pem").write_text("nonsense")
        for url in ("https://x", "grpcs://x"):
            with pytest.raises(InvalidInput, match=r"ca\.pem"):
                Client(url, ca_file=tmp_path / "ca.pem")


GRPC_GOOD = pb.ModelInferResponse(
    model_name="m", outputs=[{"name": "Y", "datatype": "FP32", "shape": [1]}], raw_output_contents=[b"\0\0\0@"]
).SerializeToString()


class TestGrpc:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (grpc.StatusCode.INVALID_ARGUMENT, InvalidInput),
            (grpc.StatusCode.UNAUTHENTICATED, Unauthorized),
            (grpc.StatusCode.PERMISSION_DENIED, Unauthorized),
            (grpc.StatusCode.NOT_FOUND, ModelNotFound),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
            (grpc.StatusCode.UNAVAILABLE, ModelNotReady),
            (grpc.StatusCode.INTERNAL, ServerError),
            (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        ],
    )
    def test_status_to_error(self, infer: Infer, code: grpc.StatusCode, kind: type[ClientError]) -> None:
        with CannedGrpc([(code, "because")]) as server:
            with pytest.raises(kind) as caught:
                infer(server.url, max_retries=0)
            assert type(caught.value) is kind
            assert caught.value.status == code.name
            assert server.methods == ["ModelInfer"]

    @pytest.mark.parametrize(
        "answer",
        [
            b"\xff\xff\xff",
            pb.ModelInferResponse(
                outputs=[{"name": "Y", "datatype": "FP32"}], raw_output_contents=[b"", b""]
            ).SerializeToString(),
            pb.ModelInferResponse(id="of another").SerializeToString(),
            pb.ModelInferResponse(outputs=[{"name": "Y", "datatype": "FP99", "shape": [1]}]).SerializeToString(),
            pb.ModelInferResponse(outputs=[{"name": "Y", "datatype": "FP32", "shape": [2]}]).SerializeToString(),
        ],
    )
    def test_garbage(self, infer: Infer, answer: bytes) -> None:
        with CannedGrpc([answer]) as server, pytest.raises(ProtocolError):
            infer(server.url)

    def test_unavailable_is_tried_again(self, infer: Infer) -> None:
        with CannedGrpc([(grpc.StatusCode.UNAVAILABLE, "later"), GRPC_GOOD]) as server:
            assert infer(server.url)["Y"] == [2]

    def test_a_slow_server(self, infer: Infer) -> None:
        with CannedGrpc([1.0]) as server, pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
            infer(server.url, timeout_s=0.3)

    def test_headers_become_metadata(self, infer: Infer) -> None:
        with CannedGrpc([GRPC_GOOD]) as server:
            infer(server.url, headers={"Authorization": "Bearer s3cret"})
            assert server.metadata[0]["authorization"] == "Bearer s3cret"

    @pytest.mark.parametrize(
        ("datatype", "field", "values"),
        [
            ("BOOL", "bool_contents", [True, False]),
            ("INT8", "int_contents", [-1, 2]),
            ("UINT16", "uint_contents", [1, 2]),
            ("INT64", "int64_contents", [-(2**40), 1]),
            ("UINT64", "uint64_contents", [2**60, 1]),
            ("FP32", "fp32_contents", [0.5, 2]),
            ("FP64", "fp64_contents", [0.1, 2]),
            ("BYTES", "bytes_contents", [b"a", b""]),
        ],
    )
    def test_typed_contents_of_other_servers_are_read(
        self, infer: Infer, datatype: str, field: str, values: list[Any]
    ) -> None:
        output = {"name": "Y", "datatype": datatype, "shape": [2], "contents": {field: values}}
        with CannedGrpc([pb.ModelInferResponse(outputs=[output]).SerializeToString()]) as server:
            assert infer(server.url)["Y"].tolist() == values


class TestFuzz:
    """Whatever a server says, the client ends with a value or with one of its own errors."""

    @settings(max_examples=300, deadline=None)
    @given(
        document=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "outputs",
                            "name",
                            "shape",
                            "datatype",
                            "parameters",
                            "binary_data_size",
                            "data",
                            "id",
                            "model_name",
                        ]
                    ),
                    inner,
                    max_size=5,
                )
            ),
            max_leaves=15,
        ),
        tail=st.binary(max_size=20),
    )
    def test_http_answers(self, document: Any, tail: bytes) -> None:
        from graphkiln_client.transports.base import InferRequest
        from graphkiln_client.transports.http_wire import HttpAnswer, HttpWire

        head = json.dumps(document).encode()
        call = HttpWire().infer(InferRequest(model="m", version="", inputs={}, request_id="1"), 1.0, binary=True)
        answer = HttpAnswer(status=200, headers={"Inference-Header-Content-Length": str(len(head))}, body=head + tail)
        _read(call.read, answer)

    @settings(max_examples=300, deadline=None)
    @given(
        names=st.lists(st.sampled_from(["Y", "Z"]), max_size=3),
        datatype=st.sampled_from(["FP32", "BYTES", "BF16", "INT8", "X"]),
        shape=st.lists(st.integers(-3, 2**62), max_size=3),
        raw=st.lists(st.binary(max_size=12), max_size=3),
    )
    def test_grpc_answers(self, names: list[str], datatype: str, shape: list[int], raw: list[bytes]) -> None:
        from graphkiln_client.transports.base import InferRequest
        from graphkiln_client.transports.grpc_wire import GrpcWire

        outputs = [{"name": name, "datatype": datatype, "shape": shape} for name in names]
        call = GrpcWire().infer(InferRequest(model="m", version="", inputs={}), 1.0, binary=True)
        _read(call.read, pb.ModelInferResponse(outputs=outputs, raw_output_contents=raw))


def _read(read: Callable[[Any], Any], answer: Any) -> None:
    with contextlib.suppress(ProtocolError):
        read(answer)
