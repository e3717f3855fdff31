"""Calls that change the server, and only these, send the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from canned import GRPC_INFERRED, INFERRED, CannedGrpc, CannedHttp, http

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput, Unauthorized
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER, KEY_VARIABLE, key_folders
from graphkiln_client import AsyncClient, Client
from graphkiln_client.transports.endpoint import Endpoint

Infer = Callable[..., dict[str, AnyArray]]
Load = Callable[..., None]
RESTRICTED = f"This API is restricted, expecting header '{HTTP_HEADER}'"


def load_blocking(url: str, **options: str) -> None:
    with Client(url, max_retries=0, admin_key=options.get("admin_key", "")) as client:
        client.load("m")


def load_async(url: str, **options: str) -> None:
    async def load() -> None:
        async with AsyncClient(url, max_retries=0, admin_key=options.get("admin_key", "")) as client:
            await client.load("m")

    asyncio.run(load())


@pytest.fixture(params=[load_blocking, load_async], ids=["blocking", "async"])
def load(request: pytest.FixtureRequest) -> Load:
    """Load model `m`."""
    chosen: Load = request.param
    return chosen


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def publish(port: int) -> None:
    """Publish an admin key like a local server."""
    folder = next(key_folders())
    folder.mkdir(parents=True)
    (folder / str(port)).write_text("found")


class TestHttp:
    def test_explicit_admin_key(self, load: Load, infer: Infer) -> None:
        with CannedHttp([http(b""), INFERRED]) as server:
            load(server.url, admin_key="given")
            infer(server.url, admin_key="given")
        assert f"{HTTP_HEADER}: given\r\n".encode() in server.requests[0]
        assert b"given" not in server.requests[1]

    def test_local_admin_key(self, load: Load) -> None:
        with CannedHttp([http(b"")]) as server:
            publish(server.port)
            load(server.url)
        assert f"{HTTP_HEADER}: found\r\n".encode() in server.requests[0]

    def test_missing_admin_key_hint(self, load: Load) -> None:
        body = f'{{"error": "{RESTRICTED}"}}'.encode()
        with (
            CannedHttp([http(body, "403 Forbidden")]) as server,
            pytest.raises(Unauthorized, match=r"--admin-key-file FILE") as caught,
        ):
            load(server.url)
        assert caught.value.status == 403
        assert HTTP_HEADER.encode() + b":" not in server.requests[0]


class TestGrpc:
    def test_explicit_admin_key(self, load: Load, infer: Infer) -> None:
        with CannedGrpc([b"", GRPC_INFERRED]) as server:
            load(server.url, admin_key="given")
            infer(server.url, admin_key="given")
        assert [found.get(GRPC_HEADER) for found in server.metadata] == ["given", None]

    def test_local_admin_key(self, load: Load) -> None:
        with CannedGrpc([b""]) as server:
            publish(server.port)
            load(server.url)
        assert server.metadata[0][GRPC_HEADER] == "found"

    def test_unavailable_for_missing_admin_key(self, load: Load) -> None:
        """Triton rejects the call with UNAVAILABLE, which is otherwise retried."""
        refusal = f"This protocol is restricted, expecting header '{GRPC_HEADER}'"
        with (
            CannedGrpc([(grpc.StatusCode.UNAVAILABLE, refusal)]) as server,
            pytest.raises(Unauthorized, match=r"--admin-key-file FILE"),
        ):
            load(server.url)
        assert server.methods == ["RepositoryModelLoad"]


def test_invalid_admin_key() -> None:
    with pytest.raises(InvalidInput, match="admin_key"):
        Endpoint.parse("http://h", admin_key="a\r\nb")


def test_key_is_never_shown() -> None:
    assert "hidden" not in repr(Endpoint.parse("http://h", admin_key="hidden"))
