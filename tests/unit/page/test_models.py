"""The models of the page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from shown_server import LABELS, PIXELS, Shown, config

from graphkiln.page.server import describe_version, list_models
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.manifest import Manifest


def test_with_the_key_why_a_version_is_not_loaded(shown: Shown) -> None:
    first, _ = asyncio.run(list_models(shown.server(), "key"))
    assert (first["name"], first["state"], first["reason"]) == ("b", "UNAVAILABLE", "it is damaged")


def test_all_about_a_version(shown: Shown) -> None:
    found = asyncio.run(describe_version(shown.server(), "m", "1"))
    assert found["kind"] == "classification"
    assert found["labels"] == list(LABELS)
    assert found["preprocess"] == encode(PIXELS)
    assert found["inputs"][0]["shape"] == [-1, -1, -1, 3]
    assert (found["engine"], found["self_test_error"]) == ("onnxruntime", 3e-07)
    assert (found["proof"], found["proof_problem"]) == (None, "")


def test_the_proof_is_the_manifests(shown: Shown, digits: Path) -> None:
    folder = shown.folder / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text((digits / "1" / "manifest.json").read_text())
    found = asyncio.run(describe_version(shown.server(), "m", "1"))
    assert found["proof"]["digest"] == Manifest.read(folder / "manifest.json").digest
    (folder / "manifest.json").write_text(json.dumps({"format_version": 2}))
    assert "manifest.json" in asyncio.run(describe_version(shown.server(), "m", "1"))["proof_problem"]


def test_it_is_described_as_it_is_now(shown: Shown) -> None:
    """A version may have been loaded again with another configuration, or be gone."""
    server = shown.server()

    async def describe_twice() -> tuple[str, str]:
        first = await describe_version(server, "m", "1")
        shown.transport.responses["model_config"] = config(takes_images=False)
        return first["kind"], (await describe_version(server, "m", "1"))["kind"]

    assert asyncio.run(describe_twice()) == ("classification", "")
