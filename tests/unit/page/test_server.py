"""The server that the page shows: what is kept of it, and for how long."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from shown_server import Shown

from graphkiln.page import server as shown_module
from graphkiln.page.server import Stores
from graphkiln_backend.graph.errors import ManifestError, ModelNotReady


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
    monkeypatch.setattr(shown_module, "_MAX_CACHED_MODELS", 2)
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


# What the page reads of a model store, and what a URL cannot have it read.


def test_a_proof_has_the_figures_and_no_command(repository: Path) -> None:
    proof = Stores([repository / "docs", repository / "model_repository"]).proof("digits", "1")
    assert proof is not None
    assert proof["verification"][0]["relative_l2_limit"] == 1e-05
    assert proof["provenance"]["metrics"]["test_accuracy"] > 0.99
    assert "command" not in json.dumps(proof)
    assert len(proof["digest"]) == 64


@pytest.mark.parametrize(
    ("model", "version"),
    [
        ("digits", "2"),
        ("nothing", "1"),
        ("..", "1"),
        (".", "1"),
        ("digits", ".."),
        ("digits", "01"),
        ("a/b", "1"),
        ("", "1"),
    ],
)
def test_what_is_not_there(repository: Path, model: str, version: str) -> None:
    stores = Stores([repository / "model_repository"])
    assert stores.proof(model, version) is None
    assert stores.golden(model, version) is None


@pytest.mark.parametrize(("model", "version"), [("..", "1"), ("../digits", "1"), ("inner", "../1"), ("inner/..", "1")])
def test_a_url_leads_to_nothing_outside_of_the_store(
    repository: Path, tmp_path: Path, model: str, version: str
) -> None:
    source = repository / "model_repository" / "digits"
    (tmp_path / "store" / "inner" / "1").mkdir(parents=True)
    for outside in (tmp_path / "1", tmp_path / "digits" / "1", tmp_path / "store" / "1"):
        shutil.copytree(source / "1", outside)
    assert Stores([tmp_path / "store"]).proof(model, version) is None


def test_a_damaged_manifest(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "model_repository" / "digits", tmp_path / "digits")
    path = tmp_path / "digits" / "1" / "manifest.json"
    path.write_text(path.read_text().replace("0.9933", "0.9999"))
    with pytest.raises(ManifestError, match="not as it was written"):
        Stores([tmp_path]).proof("digits", "1")
