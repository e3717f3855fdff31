"""Facts that an earlier start found out: kept by all that they depend on, read as they were written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import importing
from graphkiln_backend.lowering.artifacts import (
    CHOICE,
    FILE_HASH,
    OBSERVATIONS,
    FileHash,
    Measurement,
    Observations,
    recall,
)
from graphkiln_backend.lowering.importing import recall_graph
from graphkiln_backend.repository import onnx_file
from graphkiln_backend.repository.onnx_file import known_facts, known_sha256, read_facts, read_signature

KEY = {"device": "cpu"}
CHOSEN = Measurement(chosen="b", rates={"a": 1.5, "b": 2.0})
PLACEMENT = Placement(
    nodes={"CPU": 3}, precision="unknown", products={Precision.BF16: 2, "fp64": 1}, elsewhere=("conv",)
)
OBSERVED = Observations(complete=True, placed=PLACEMENT, mixed="a row", repeats=True, warmed=(2, 8, 8))


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


class TestKinds:
    """Caches of users hold these files: another field, or a rule that finds something else, needs another version."""

    @pytest.mark.parametrize(
        ("kind", "fact", "document"),
        [
            (CHOICE, CHOSEN, {"chosen": "b", "rates": {"a": 1.5, "b": 2.0}}),
            (FILE_HASH, FileHash(sha256="abc"), {"sha256": "abc"}),
            (
                OBSERVATIONS,
                OBSERVED,
                {
                    "complete": True,
                    "placed": {
                        "nodes": {"CPU": 3},
                        "precision": "unknown",
                        "products": {"bf16": 2, "fp64": 1},
                        "elsewhere": ["conv"],
                    },
                    "mixed": "a row",
                    "repeats": True,
                    "warmed": [2, 8, 8],
                },
            ),
        ],
        ids=["choice", "hash", "observations"],
    )
    def test_a_later_start_reads_what_is_kept(self, tmp_path: Path, kind: Any, fact: Any, document: object) -> None:
        with ArtifactCache(tmp_path) as cache, recall(kind, cache, "m/1", KEY) as memory:
            assert memory.value is None
            memory.keep(fact)
        (file,) = tmp_path.glob(f"entries/{kind.name}-*/{kind.file}")
        assert json.loads(file.read_text()) == document
        with ArtifactCache(tmp_path) as cache, recall(kind, cache, "m/1", KEY) as memory:
            assert memory.value == fact

    def test_facts_of_a_graph(self, graph: Path) -> None:
        x, y = ({"name": name, "dtype": "FP32", "shape": ["n", 3]} for name in "xy")
        assert encode(read_facts(graph)) == {
            "signature": {"inputs": [x], "outputs": [y], "optional_inputs": []},
            "precision": "fp32",
        }

    def test_an_unreadable_fact_is_found_out_again(
        self, cache: ArtifactCache, logged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with recall(OBSERVATIONS, cache, "m/1", KEY) as memory:
            memory.keep(OBSERVED)
        monkeypatch.setattr(json, "loads", lambda _: {"complete": "yes"})
        with recall(OBSERVATIONS, cache, "m/1", KEY) as memory:
            assert memory.value is None
        assert "cannot read" in logged[-1]


class TestGraphs:
    """Facts of a graph's file, which are never taken for those of another file."""

    @pytest.fixture(autouse=True)
    def _forget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnx_file, "_known", {})

    @pytest.fixture
    def later(self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        """Starts again: the cache's folder is there, and nothing was read."""

        def start(path: Path) -> None:
            monkeypatch.setattr(onnx_file, "_known", {})
            onnx_file._read_once.cache_clear()
            with ArtifactCache(cache.folder) as opened:
                recall_graph(path, opened)

        return start

    def test_a_later_start_parses_nothing(
        self, cache: ArtifactCache, graph: Path, later: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recall_graph(graph, cache)
        signature = read_signature(graph)
        monkeypatch.setattr(onnx_file, "onnx", None)
        later(graph)
        assert read_signature(graph) == signature

    @pytest.mark.parametrize(("settled_ns", "hashes"), [(0, 1), (3_600_000_000_000, 2)])
    def test_a_file_that_has_not_changed_is_not_read_for_its_hash(
        self,
        cache: ArtifactCache,
        graph: Path,
        later: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        settled_ns: int,
        hashes: int,
    ) -> None:
        """One that changed a moment ago is: it may have changed twice within a tick of the clock."""
        read: list[Path] = []
        sha256_of = importing.sha256_of
        monkeypatch.setattr(importing, "sha256_of", lambda path, limit: read.append(path) or sha256_of(path, limit))
        monkeypatch.setattr(importing, "_SETTLED_NS", settled_ns)
        recall_graph(graph, cache)
        known = known_sha256(graph)
        linked = graph.with_name("linked.onnx")
        linked.symlink_to(graph)
        later(linked)
        assert len(read) == hashes
        assert known_sha256(linked) == known != ""

    def test_another_file_is_another_graph(
        self, cache: ArtifactCache, graph: Path, later: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importing, "_SETTLED_NS", -1)
        recall_graph(graph, cache)
        write(graph, width=5)
        later(graph)
        assert read_signature(graph).inputs[0].shape == ("n", 5)

    @pytest.mark.parametrize("content", [b"damaged", None])
    def test_a_damaged_graph_is_an_error_of_the_first_reader(
        self, cache: ArtifactCache, graph: Path, content: Any
    ) -> None:
        if content:
            graph.write_bytes(content)
        else:
            graph.unlink()
        recall_graph(graph, cache)
        with pytest.raises(RepositoryError, match="is not an ONNX graph"):
            read_signature(graph)

    def test_a_graph_with_weights_in_another_file_is_read_each_time(self, cache: ArtifactCache, graph: Path) -> None:
        model = onnx_file.read_whole_graph(graph)
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
        self, cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def replace_and_read(path: Path) -> Any:
            write(path, width=5)
            return read_facts(path)

        monkeypatch.setattr(importing, "read_facts", replace_and_read)
        recall_graph(graph, cache)
        assert known_facts(graph) is None
        assert not cache.entries()

    def test_a_cache_that_cannot_be_written_is_no_fault(
        self, cache: ArtifactCache, graph: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("graphkiln_backend.cache.store.make_private", fail)
        recall_graph(graph, cache)
        assert read_signature(graph).inputs[0].shape == ("n", 3)
        assert logged == []
