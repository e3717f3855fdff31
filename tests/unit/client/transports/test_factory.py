"""The transport of an endpoint."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkiln_client.runner import run
from graphkiln_client.transports import open_async, open_blocking
from graphkiln_client.transports.endpoint import Endpoint


@pytest.mark.parametrize(
    ("scheme", "blocking", "asynchronous"),
    [
        ("http", "HttpTransport", "AsyncHttpTransport"),
        ("https", "HttpTransport", "AsyncHttpTransport"),
        ("grpc", "GrpcTransport", "AsyncGrpcTransport"),
        ("grpcs", "GrpcTransport", "AsyncGrpcTransport"),
    ],
)
def test_by_the_scheme_of_the_url(scheme: str, blocking: str, asynchronous: str) -> None:
    endpoint = Endpoint.parse(f"{scheme}://127.0.0.1:9", {}, None)
    first, second = open_blocking(endpoint, ""), open_async(endpoint, "")
    assert (type(first).__name__, type(second).__name__) == (blocking, asynchronous)
    run(first.close())
    run(second.close())  # nothing was opened yet: nothing to wait for


def test_http_does_not_pay_for_grpc() -> None:
    program = """
import sys
from graphkiln_client import Client
with Client("http://127.0.0.1:9"):
    print(*sorted({"grpc", "google.protobuf", "aiohttp", "PIL"} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "grpc" not in shown.stdout.split()
    assert "aiohttp" not in shown.stdout.split()
