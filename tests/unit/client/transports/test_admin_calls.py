"""What changes a server carries its admin key, over every transport, and nothing else does."""

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
    """Loads a model `m`."""
    chosen: Load = request.param
    return chosen


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def publish(port: int) -> None:
    """As a server of the same user does."""
    folder = next(key_folders())
    folder.mkdir(parents=True)
    (folder / str(port)).write_text("found")


class TestHttp:
    def test_the_key_that_was_given(self, load: Load, infer: Infer) -> None:
        with CannedHttp([http(b""), INFERRED]) as server:
            load(server.url, admin_key="given")
            infer(server.url, admin_key="given")
        assert f"{HTTP_HEADER}: given\r\n".encode() in server.requests[0]
        assert b"given" not in server.requests[1]

    def test_the_key_of_a_server_on_this_machine(self, load: Load) -> None:
        with CannedHttp([http(b"")]) as server:
            publish(server.port)
            load(server.url)
        assert f"{HTTP_HEADER}: found\r\n".encode() in server.requests[0]

    def test_without_it_the_error_says_how_to_give_it(self, load: Load) -> None:
        body = f'{{"error": "{RESTRICTED}"}}'.encode()
        with (
            CannedHttp([http(body, "403 Forbidden")]) as server,
            pytest.raises(Unauthorized, match=r"--admin-key-file FILE") as caught,
        ):
            load(server.url)
        assert caught.value.status == 403
        assert HTTP_HEADER.encode() + b":" not in server.requests[0]


class TestGrpc:
    def test_the_key_that_was_given(self, load: Load, infer: Infer) -> None:
        with CannedGrpc([b"", GRPC_INFERRED]) as server:
            load(server.url, admin_key="given")
            infer(server.url, admin_key="given")
        assert [found.get(GRPC_HEADER) for found in server.metadata] == ["given", None]

    def test_the_key_of_a_server_on_this_machine(self, load: Load) -> None:
        with CannedGrpc([b""]) as server:
            publish(server.port)
            load(server.url)
        assert server.metadata[0][GRPC_HEADER] == "found"

    def test_tritons_unavailable_is_no_server_out_of_reach(self, load: Load) -> None:
        """Triton refuses with UNAVAILABLE, which means "try again" otherwise."""
        refusal = f"This protocol is restricted, expecting header '{GRPC_HEADER}'"
        with (
            CannedGrpc([(grpc.StatusCode.UNAVAILABLE, refusal)]) as server,
            pytest.raises(Unauthorized, match=r"--admin-key-file FILE"),
        ):
            load(server.url)
        assert server.methods == ["RepositoryModelLoad"]


def test_a_key_that_cannot_be_sent() -> None:
    with pytest.raises(InvalidInput, match="admin_key"):
        Endpoint.parse("http://h", admin_key="a\r\nb")


def test_the_key_is_never_shown() -> None:
    assert "hidden" not in repr(Endpoint.parse("http://h", admin_key="hidden"))
