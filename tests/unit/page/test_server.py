"""The server behind the page: caches, stores, metrics and models."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from shown_server import LABELS, METRICS, PIXELS, ROLLOUT, Shown, config

from graphkiln.page.server import (
    Stores,
    describe_version,
    list_models,
    parse_metrics,
    placements,
    read_metrics,
    rollouts,
    traffic,
)
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import ConnectionFailed, ManifestError, ModelNotReady
from graphkiln_backend.graph.manifest import Manifest


@pytest.mark.parametrize(
    ("everywhere", "host", "url"),
    [
        (False, "192.0.2.7:8003", "http://127.0.0.1:8000"),
        (True, "192.0.2.7:8003", "http://192.0.2.7:8000"),
        (True, "[::1]:8003", "http://[::1]:8000"),
        (True, "[::1]", "http://[::1]:8000"),
    ],
)
def test_url_for_host(shown: Shown, everywhere: bool, host: str, url: str) -> None:
    server = shown.server()
    server.everywhere = everywhere
    assert server.url_for(host) == url


def test_disabled_metrics(shown: Shown) -> None:
    server = shown.server()
    server.metrics_url = ""
    assert asyncio.run(server.placements()) == {}
    with pytest.raises(ModelNotReady, match="no metrics"):
        asyncio.run(server.traffic())


def test_proof_has_no_command(repository: Path) -> None:
    proof = Stores([repository / "docs", repository / "model_repository"]).proof("digits", "1")
    assert proof is not None
    assert proof["verification"][0]["relative_l2_limit"] == 1e-05
    assert proof["provenance"]["metrics"]["test_accuracy"] > 0.99
    assert "command" not in json.dumps(proof)
    assert len(proof["digest"]) == 64


@pytest.mark.parametrize(
    ("model", "version"), [("digits", "2"), ("nothing", "1"), (".", "1"), ("digits", "01"), ("a/b", "1"), ("", "1")]
)
def test_missing_version(repository: Path, model: str, version: str) -> None:
    stores = Stores([repository / "model_repository"])
    assert stores.proof(model, version) is None
    assert stores.golden(model, version) is None


@pytest.mark.parametrize(("model", "version"), [("..", "1"), ("../digits", "1"), ("inner", "../1"), ("inner/..", "1")])
def test_path_traversal_is_refused(repository: Path, tmp_path: Path, model: str, version: str) -> None:
    source = repository / "model_repository" / "digits"
    (tmp_path / "store" / "inner" / "1").mkdir(parents=True)
    for outside in (tmp_path / "1", tmp_path / "digits" / "1", tmp_path / "store" / "1"):
        shutil.copytree(source / "1", outside)
    assert Stores([tmp_path / "store"]).proof(model, version) is None


def test_damaged_manifest(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "model_repository" / "digits", tmp_path / "digits")
    path = tmp_path / "digits" / "1" / "manifest.json"
    path.write_text(path.read_text().replace("0.9933", "0.9999"))
    with pytest.raises(ManifestError, match="not as it was written"):
        Stores([tmp_path]).proof("digits", "1")


TEXT = METRICS.read_text()


def test_labels_are_unescaped() -> None:
    assert {sample.labels.get("model") for sample in parse_metrics(TEXT)} == {"m", 'other "one"\\', None}


def test_traffic_by_version() -> None:
    row, other = traffic(parse_metrics(TEXT))
    assert row == {
        "model": "m", "version": "1", "answered": 40, "failed": 4, "samples": 80, "batches": 20, "request_us": 120000,
        "queue_us": 40000, "waiting": 3, "p50_us": 900, "p99_us": 4000, "sizes": {"1": 7, "+Inf": 12},
    }  # fmt: skip
    assert other == {"model": 'other "one"\\', "version": "2", "answered": 2, "sizes": {}}, "NaN is no latency"


def test_placements() -> None:
    assert placements(parse_metrics(TEXT)) == {
        ("m", "1"): {
            "instances": 2, "engine": "onnxruntime", "device": "cpu", "precision": "fp32", "self_test_error": 3e-07,
            "self_test_at_s": 100, "backend": "graphkiln", "seat": "python", "proven": True,
        },
        ("m", "2"): {
            "instances": 0, "backend": "onnxruntime", "seat": "native", "proven": True, "self_test_error": 2e-07,
            "self_test_at_s": 300,
        },
        ('other "one"\\', "2"): {"instances": 0, "backend": "tensorrt", "seat": "", "proven": False},
    }  # fmt: skip


def test_rollouts(shown: Shown, tmp_path: Path) -> None:
    assert rollouts(parse_metrics(TEXT)) == {}
    text = TEXT + ROLLOUT.format(phase="shadow", by="user", compared=2000)
    expected = {
        "version": "2", "serving": "1", "phase": "shadow", "by": "user", "share": 0.05, "compared": 2000,
        "disagreed": 4, "undecided": 0, "answered": 0, "dropped": 7, "failed": 1, "lower": 0.9914, "upper": 0.9995,
        "limit": 0.995,
        "latency": {
            "serving": {"0.5": pytest.approx(3.04), "0.99": pytest.approx(8.1)},
            "candidate": {"0.5": pytest.approx(2.9), "0.99": pytest.approx(7.9)},
        },
    }  # fmt: skip
    assert rollouts(parse_metrics(text)) == {"m": expected}
    (tmp_path / "metrics").write_text(text)
    server = shown.server()
    server.metrics_url = (tmp_path / "metrics").as_uri()
    found = asyncio.run(list_models(server, ""))
    assert {row["name"]: row["rollout"] for row in found} == {"m": expected}


def test_refused_versions_need_no_key(shown: Shown, tmp_path: Path) -> None:
    lines = [f'graphkiln_version_refused{{model="{name}",version="2",reason="it is \\"bad\\""}} 1' for name in "ab"]
    (tmp_path / "metrics").write_text("\n".join((TEXT.rstrip(), *lines, "")))
    server = shown.server()
    server.metrics_url = (tmp_path / "metrics").as_uri()
    found = {(row["name"], row["state"]): row["reason"] for row in asyncio.run(list_models(server, ""))}
    assert found == {("m", "READY"): "", ("a", "REFUSED"): 'it is "bad"', ("b", "REFUSED"): 'it is "bad"'}
    rows = asyncio.run(list_models(server, "key"))
    assert [row["reason"] for row in rows if row["name"] == "b"] == ["it is damaged"], "the server's own list is first"


def test_unreachable_metrics(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match="metrics cannot be read"):
        read_metrics((tmp_path / "nothing").as_uri())


def test_models_with_admin_key(shown: Shown) -> None:
    first, _ = asyncio.run(list_models(shown.server(), "key"))
    assert (first["name"], first["state"], first["reason"]) == ("b", "UNAVAILABLE", "it is damaged")


def test_describe_version(shown: Shown) -> None:
    found = asyncio.run(describe_version(shown.server(), "m", "1"))
    assert found["kind"] == "classification"
    assert found["labels"] == list(LABELS)
    assert found["preprocess"] == encode(PIXELS)
    assert found["inputs"][0]["shape"] == [-1, -1, -1, 3]
    assert (found["engine"], found["self_test_error"]) == ("onnxruntime", 3e-07)
    assert (found["proof"], found["proof_problem"]) == (None, "")


def test_proof_from_manifest(shown: Shown, digits: Path) -> None:
    folder = shown.folder / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text((digits / "1" / "manifest.json").read_text())
    found = asyncio.run(describe_version(shown.server(), "m", "1"))
    assert found["proof"]["digest"] == Manifest.read(folder / "manifest.json").digest
    (folder / "manifest.json").write_text(json.dumps({"format_version": 2}))
    assert "manifest.json" in asyncio.run(describe_version(shown.server(), "m", "1"))["proof_problem"]


def test_description_is_not_cached(shown: Shown) -> None:
    server = shown.server()

    async def describe_twice() -> tuple[str, str]:
        first = await describe_version(server, "m", "1")
        shown.transport.responses["model_config"] = config(takes_images=False)
        return first["kind"], (await describe_version(server, "m", "1"))["kind"]

    assert asyncio.run(describe_twice()) == ("classification", "")
