"""A server behind the edge, with mutual TLS over both protocols; the last test stops it."""

from __future__ import annotations

import datetime
import http.client
import json
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import trustme
from running import Server, Serving, run_command

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady
from graphkiln_backend.server.edge import find_haproxy
from graphkiln_client import Client

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(find_haproxy() is None, reason="HAProxy is not installed"),
]

IMAGE = np.full((1, 1, 32, 32), 0.5, np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates: ca.pem, server.pem, client.pem and expired.pem, each with its key; other.pem is another CA."""
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    server = authority.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(str(folder / "server.key"))
    server.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    expired = authority.issue_cert("a@b.org", not_before=past, not_after=past + datetime.timedelta(days=9))
    strange = trustme.CA().issue_cert("a@b.org")
    for name, pair in (("client", authority.issue_cert("a@b.org")), ("expired", expired), ("stranger", strange)):
        pair.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
        pair.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    renewed = authority.issue_cert("127.0.0.1", "localhost", common_name="renewed")
    renewed.private_key_and_cert_chain_pem.write_to_path(str(folder / "renewed.pem"))
    return folder


@pytest.fixture(scope="module")
def mutual(folder: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server of the digits that requires client certificates."""
    names = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    files = [word for option, name in names.items() for word in (option, folder / name)]
    with Serving(tmp_path_factory.mktemp("server"), "--model-store", digits.parent, *files) as server:
        server.wait_until(lambda: "serving with TLS" in server.log)
        yield server


def context(folder: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "ca.pem")
    made.load_cert_chain(folder / "client.pem")
    return made


def child(server: Server, name: str) -> psutil.Process:
    return next(each for each in psutil.Process(server.process.pid).children() if each.name() == name)


def ask(
    server: Server, folder: Path, path: str = "/v2/health/ready", body: bytes | None = None
) -> tuple[int, Any, http.client.HTTPResponse]:
    connection = http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=30, context=context(folder))
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read(), response
    finally:
        connection.close()


def triton_grpc(server: Server, folder: Path) -> tritonclient.grpc.InferenceServerClient:
    return tritonclient.grpc.InferenceServerClient(
        f"127.0.0.1:{server.grpc_port}",
        ssl=True,
        root_certificates=str(folder / "ca.pem"),
        private_key=str(folder / "client.key"),
        certificate_chain=str(folder / "client.pem"),
    )


def digits_input() -> tritonclient.grpc.InferInput:
    given = tritonclient.grpc.InferInput("INPUT_0", IMAGE.shape, "FP32")
    given.set_data_from_numpy(IMAGE)
    return given


@pytest.fixture(params=["http", "grpc"])
def url(mutual: Server, request: pytest.FixtureRequest) -> str:
    plain = mutual.url if request.param == "http" else mutual.grpc_url
    return plain.replace("://", "s://")


def test_client_with_certificate_is_served_and_finds_the_admin_key(url: str, folder: Path, repository: Path) -> None:
    with Client(url, ca_file=folder / "ca.pem", client_cert=folder / "client.pem") as client:
        assert client.model("digits").classify(repository / "docs" / "digits" / "seven.png").top.label == "seven"
        assert client.models()[0].ready


def test_command_line(url: str, folder: Path) -> None:
    files = ("--ca-file", folder / "ca.pem", "--client-cert", folder / "client.pem")
    assert run_command("health", "--url", url, *files).stdout == "ready\n"


@pytest.mark.parametrize("certificate", [None, "expired.pem", "stranger.pem"])
def test_clients_without_a_valid_certificate_are_refused(url: str, folder: Path, certificate: str | None) -> None:
    own = folder / certificate if certificate else None
    with (
        Client(url, ca_file=folder / "ca.pem", client_cert=own, max_retries=0) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.ready()


def test_other_authority_is_not_trusted(url: str, folder: Path) -> None:
    with (
        Client(url, ca_file=folder / "other.pem", client_cert=folder / "client.pem", max_retries=0) as client,
        pytest.raises(ConnectionFailed, match=r"certificate verify failed|CERTIFICATE_VERIFY_FAILED"),
    ):
        client.ready()


def test_plain_requests_get_no_response(mutual: Server) -> None:
    for url in (mutual.url, mutual.grpc_url):
        with Client(url, max_retries=0) as client, pytest.raises(ConnectionFailed):
            client.ready()


def test_tritonclient(mutual: Server, folder: Path) -> None:
    with tritonclient.http.InferenceServerClient(
        f"127.0.0.1:{mutual.http_port}", ssl=True, ssl_context_factory=lambda: context(folder)
    ) as over_http:
        assert over_http.is_server_ready()
    with triton_grpc(mutual, folder) as client:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        for _ in range(3):
            client.async_stream_infer("digits", [digits_input()])
        client.stop_stream()
        assert [error for _, error in answers] == [None] * 3


def test_administrative_requests_need_the_key_over_both_protocols(mutual: Server, folder: Path) -> None:
    status, body, _ = ask(mutual, folder, "/v2/repository/index", b"")
    assert status == 403
    assert "x-graphkiln-admin-key" in json.loads(body)["error"]
    with triton_grpc(mutual, folder) as client:
        for call in (client.get_model_repository_index, client.get_log_settings):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="restricted"):
                call()


def test_metrics_of_edge_and_triton(mutual: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", mutual.metrics_port, timeout=30)
    for path, metric in (
        ("/metrics", b"nv_inference_count"),
        ("/edge/metrics", b"haproxy_frontend_http_requests_total"),
    ):
        connection.request("GET", path)
        assert metric in connection.getresponse().read()
    connection.close()


def test_restart_of_triton_gives_503_and_refuses_no_connection(mutual: Server, folder: Path) -> None:
    starts = mutual.log.count("serving with TLS")
    statuses, errors = [], []
    with triton_grpc(mutual, folder) as client:
        child(mutual, "tritonserver").kill()
        while mutual.log.count("serving with TLS") == starts:
            status, body, response = ask(mutual, folder)
            statuses.append(status)
            if status == 503:
                assert json.loads(body) == {"error": "the server restarts, try again in a few seconds"}
                assert response.getheader("Retry-After") == "1"
            try:
                client.infer("digits", [digits_input()])
            except tritonclient.utils.InferenceServerException as error:
                errors.append(error.status())
    assert 503 in statuses
    assert set(statuses) <= {200, 502, 503}
    assert set(errors) == {"StatusCode.UNAVAILABLE"}


def test_killed_edge_is_restarted(mutual: Server, folder: Path) -> None:
    child(mutual, "haproxy").kill()
    mutual.wait_until(lambda: "restarting it" in mutual.log)
    assert ask(mutual, folder)[0] == 200


def test_certificate_is_renewed_without_a_restart(mutual: Server, folder: Path) -> None:
    (folder / "server.key").write_bytes((folder / "renewed.pem").read_bytes())
    (folder / "server.pem").write_bytes((folder / "renewed.pem").read_bytes())

    def name() -> str:
        connection = http.client.HTTPSConnection("127.0.0.1", mutual.http_port, timeout=30, context=context(folder))
        connection.connect()
        subject = dict(pair for (pair,) in connection.sock.getpeercert()["subject"])
        connection.close()
        return subject.get("commonName", "")

    mutual.wait_until(lambda: name() == "renewed", timeout_s=30)


class Sender(threading.Thread):
    """Send one request after the other until connections are refused."""

    BODY = json.dumps(
        {"inputs": [{"name": "INPUT_0", "datatype": "FP32", "shape": [1, 1, 32, 32], "data": [0.5] * 1024}]}
    )

    def __init__(self, server: Server, folder: Path, *, keep: bool) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPSConnection(
            "127.0.0.1", server.http_port, timeout=30, context=context(folder)
        )
        self._keep = keep
        self.statuses: list[int] = []
        self.failure = ""

    def run(self) -> None:
        try:
            while True:
                self._connection.request("POST", "/v2/models/digits/infer", self.BODY)
                response = self._connection.getresponse()
                response.read()
                self.statuses.append(response.status)
                if not self._keep:
                    self._connection.close()
                time.sleep(0.02)
        except ConnectionRefusedError:
            pass
        except (OSError, http.client.HTTPException) as error:
            self.failure = repr(error)


def test_stop_answers_every_request_and_resets_no_connection(mutual: Server, folder: Path) -> None:
    """Over kept connections, new connections, and gRPC."""
    senders = [Sender(mutual, folder, keep=keep) for keep in (True, True, False)]
    for sender in senders:
        sender.start()
    refusals: list[ClientError] = []
    url = mutual.grpc_url.replace("://", "s://")
    with Client(url, ca_file=folder / "ca.pem", client_cert=folder / "client.pem", max_retries=0) as client:
        model = client.model("digits")
        for _ in range(20):
            model.infer({"INPUT_0": IMAGE})
        mutual.process.send_signal(signal.SIGTERM)
        while mutual.process.poll() is None:
            try:
                model.infer({"INPUT_0": IMAGE})
            except ClientError as error:
                refusals.append(error)
    for sender in senders:
        sender.join(60)
    assert mutual.process.returncode == 0, mutual.log
    assert [sender.failure for sender in senders] == ["", "", ""]
    assert {status for sender in senders for status in sender.statuses} == {200, 503}
    assert {type(error) for error in refusals} <= {ConnectionFailed, ModelNotReady}
