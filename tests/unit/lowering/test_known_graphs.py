"""What a graph's file says is kept for later starts, and never taken for that of another file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering import importing as known_graphs
from graphkiln_backend.lowering.importing import convert_if_needed, recall_graph
from graphkiln_backend.repository import onnx_file as graph_facts
from graphkiln_backend.repository import onnx_file as onnx_reading
from graphkiln_backend.repository.onnx_file import known_facts, known_sha256, read_signature


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_facts, "_known", {})


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ArtifactCache]:
    with ArtifactCache(tmp_path / "cache") as cache:
        yield cache


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write(tmp_path / "store" / "m" / "1" / "model.onnx", width=3)


def write(path: Path, width: int) -> Path:
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    proto = zoo.model(
        nodes, [zoo.value("x", ("n", width))], [zoo.value("y", ("n", width))], {"w": np.ones(width, np.float32)}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString())
    return path


def start_again(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> ArtifactCache:
    """What a new process has: the cache's folder, and nothing read."""
    monkeypatch.setattr(graph_facts, "_known", {})
    onnx_reading._read_once.cache_clear()
    return ArtifactCache(cache.folder)


def test_a_later_start_parses_nothing(cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recall_graph(graph, cache)
    signature = read_signature(graph)
    with start_again(cache, monkeypatch) as later, monkeypatch.context() as patched:
        patched.setattr(onnx_reading, "onnx", None)
        recall_graph(graph, later)
        assert read_signature(graph) == signature


@pytest.mark.parametrize(("settled_ns", "hashes"), [(0, 1), (3_600_000_000_000, 2)])
def test_a_file_that_has_not_changed_is_not_read_for_its_hash(
    cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch, settled_ns: int, hashes: int
) -> None:
    """One that changed a moment ago is: it may have changed twice within a tick of the clock."""
    read: list[Path] = []
    sha256_of = known_graphs.sha256_of
    monkeypatch.setattr(known_graphs, "sha256_of", lambda path, limit: read.append(path) or sha256_of(path, limit))
    monkeypatch.setattr(known_graphs, "_SETTLED_NS", settled_ns)
    recall_graph(graph, cache)
    known = known_sha256(graph)
    linked = graph.with_name("linked.onnx")
    linked.symlink_to(graph)
    with start_again(cache, monkeypatch) as later:
        recall_graph(linked, later)
    assert len(read) == hashes
    assert known_sha256(linked) == known != ""


def test_another_file_is_another_graph(cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_graphs, "_SETTLED_NS", -1)
    recall_graph(graph, cache)
    write(graph, width=5)
    with start_again(cache, monkeypatch) as later:
        recall_graph(graph, later)
    assert read_signature(graph).inputs[0].shape == ("n", 5)


def test_changed_rules_read_it_again(cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recall_graph(graph, cache)
    monkeypatch.setattr(known_graphs, "source_digest", lambda *_: "another rule")
    reads: list[Path] = []
    read = known_graphs.read_facts
    monkeypatch.setattr(known_graphs, "read_facts", lambda path: reads.append(path) or read(path))
    with start_again(cache, monkeypatch) as later:
        recall_graph(graph, later)
    assert reads == [graph]


def test_what_is_kept_and_cannot_be_read_is_read_from_the_graph(
    cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall_graph(graph, cache)
    monkeypatch.setattr(known_graphs.json, "loads", lambda _: {"signature": 3})
    with start_again(cache, monkeypatch) as later:
        recall_graph(graph, later)
    assert known_facts(graph) is not None


@pytest.mark.parametrize("content", [b"damaged", None])
def test_a_damaged_graph_is_told_by_whoever_reads_it(cache: ArtifactCache, graph: Path, content: Any) -> None:
    if content:
        graph.write_bytes(content)
    else:
        graph.unlink()
    recall_graph(graph, cache)
    with pytest.raises(RepositoryError, match="is not an ONNX graph"):
        read_signature(graph)


def test_a_graph_whose_weights_lie_elsewhere_is_read_each_time(cache: ArtifactCache, graph: Path) -> None:
    model = onnx_reading.read_whole_graph(graph)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = 1
    tensor.external_data.add(key="location", value="weights")
    graph.write_bytes(model.SerializeToString())
    recall_graph(graph, cache)
    assert known_facts(graph) is None
    with pytest.raises(RepositoryError, match="'weights', which is missing"):
        read_signature(graph)


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept(
    cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = known_graphs.read_facts

    def replace(path: Path) -> Any:
        write(path, width=5)
        return read(path)

    monkeypatch.setattr(known_graphs, "read_facts", replace)
    recall_graph(graph, cache)
    assert known_facts(graph) is None
    assert not cache.entries()


def test_a_cache_that_does_not_last_keeps_nothing(tmp_path: Path, graph: Path) -> None:
    with ArtifactCache(tmp_path / "cache", lasting=False) as cache:
        recall_graph(graph, cache)
        assert not cache.entries()


def test_a_cache_that_cannot_be_written_is_no_fault(
    cache: ArtifactCache, graph: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("graphkiln_backend.cache.store.make_private", fail)
    recall_graph(graph, cache)
    assert read_signature(graph).inputs[0].shape == ("n", 3)
    assert logged == []


@pytest.mark.parametrize(
    ("manifest", "recalled"),
    [(None, True), ('{"conversion": null}', True), ('{"conversion": {"precision": "fp32"}}', False), ("{", False)],
)
def test_what_the_manifest_tells_is_not_looked_for(
    cache: ArtifactCache, graph: Path, manifest: str | None, recalled: bool
) -> None:
    if manifest:
        (graph.parent / "manifest.json").write_text(manifest)
    assert convert_if_needed(graph.parent, cache) == graph.parent
    assert (known_facts(graph) is not None) == recalled
