"""The server that the page shows: what is kept of it, and for how long."""

from __future__ import annotations

import asyncio

import pytest
from shown_server import Shown

from graphkiln.page import server as shown_module
from graphkiln_backend.graph.errors import ModelNotReady


def test_a_model_is_read_once_until_it_is_forgotten(shown: Shown) -> None:
    server = shown.server()

    async def ask() -> None:
        for _ in range(2):
            await server.served("m", "1")
        assert len(shown.transport.sent("model_metadata")) == 1
        server.forget("m")
        await server.served("m", "1")
        assert len(shown.transport.sent("model_metadata")) == 2
        await server.close()

    asyncio.run(ask())
    assert shown.transport.closed


def test_what_was_read_of_a_version_is_read_again_after_a_while(shown: Shown) -> None:
    """Whoever has it loaded again tells the page nothing."""
    server, seconds = shown.server(), iter([0.0, 5.0, 100.0, 100.0])
    server.now = lambda: next(seconds)
    first = server.model("a", "1")
    assert server.model("a", "1") is first
    assert server.model("a", "1") is not first


def test_of_one_version_that_is_forgotten_the_others_stay(shown: Shown) -> None:
    server = shown.server()
    first, second = server.model("a", "1"), server.model("a", "2")
    server.forget("a", "1")
    assert server.model("a", "2") is second
    assert server.model("a", "1") is not first


@pytest.mark.parametrize(
    ("everywhere", "host", "url"),
    [
        (False, "192.0.2.7:8003", "http://127.0.0.1:8000"),
        (True, "192.0.2.7:8003", "http://192.0.2.7:8000"),
        (True, "localhost", "http://localhost:8000"),
        (True, "[::1]:8003", "http://[::1]:8000"),
        (True, "[::1]", "http://[::1]:8000"),
    ],
)
def test_the_server_is_where_the_page_was_reached(shown: Shown, everywhere: bool, host: str, url: str) -> None:
    server = shown.server()
    server.everywhere = everywhere
    assert server.url_for(host) == url


def test_names_that_somebody_makes_up_do_not_fill_the_memory(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "_MOST_MODELS", 2)
    server = shown.server()
    first = server.model("a", "1")
    server.model("b", "1")
    assert server.model("a", "1") is first
    server.model("c", "1")
    assert server.model("a", "1") is first
    assert len(server._models) == 2


def test_metrics_that_are_off(shown: Shown) -> None:
    server = shown.server()
    server.metrics_url = ""
    assert asyncio.run(server.placements()) == {}
    with pytest.raises(ModelNotReady, match="no metrics"):
        asyncio.run(server.traffic())
