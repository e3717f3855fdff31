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
