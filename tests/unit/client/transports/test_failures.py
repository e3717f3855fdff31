"""The errors of a connection: each names the server, none a secret."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, ProtocolError
from graphkiln_client.transports import failures
from graphkiln_client.transports.base import Deadline
from graphkiln_client.transports.endpoint import Endpoint

ENDPOINT = Endpoint.parse("https://me:s3cret@host:8443/triton", {"X-Token": "s3cret"}, None)
PLAIN = Endpoint.parse("http://me:s3cret@host:8443/triton")
ALERT = OSError("no route: TLSV13_ALERT_CERTIFICATE_REQUIRED")
CAUSE = OSError("no route")


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (failures.deadline_exceeded(ENDPOINT, Deadline.after(0.25)), DeadlineExceeded, ""),
        (failures.disconnected(PLAIN, CAUSE), ConnectionFailed, ""),
        (failures.disconnected(ENDPOINT, CAUSE), ConnectionFailed, failures._NO_CERTIFICATE),
        (failures.unreachable(ENDPOINT, "no route: Socket closed"), ConnectionFailed, failures._NO_CERTIFICATE),
        (failures.tls_failed(ENDPOINT, ALERT), ConnectionFailed, failures._NO_CERTIFICATE),
        (failures.untrusted(ENDPOINT, CAUSE), ConnectionFailed, "check its certificate"),
        (failures.tls_failed(ENDPOINT, CAUSE), ConnectionFailed, "is it an http:// server?"),
        (failures.unreachable(ENDPOINT, CAUSE), ConnectionFailed, "is the server running? graphkiln health --url URL"),
        (failures.not_http(ENDPOINT, CAUSE), ProtocolError, "is it the gRPC port? grpc://HOST:PORT"),
    ],
)
def test_what_happened_and_what_to_do(error: ClientError, kind: type[ClientError], hint: str) -> None:
    assert type(error) is kind
    assert "://host:8443/triton" in error.message
    assert "s3cret" not in f"{error} {error!r}"
    assert error.hint == hint
    assert ("no route" in error.message) == (kind is not DeadlineExceeded)


@pytest.mark.parametrize(("url", "words"), [("grpc://h:8000", "without TLS"), ("grpcs://h:8001", "with TLS")])
def test_grpc_asks_whether_it_is_its_port(url: str, words: str) -> None:
    assert words in failures.unreachable(Endpoint.parse(url), "refused").hint
