"""Artifacts and facts in the cache: built once, found by everything that they depend on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from lowered import BF16, ORT, OV, artifacts_of, has_bf16, lower_version
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import (
    LoweringError,
    RepositoryError,
)
from graphkiln_backend.graph.manifest import sha256_of
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
from graphkiln_backend.repository.onnx_file import known_facts, known_sha256, read_facts, read_precision, read_signature


class TestLoweredGraph:
    def test_lowered_graph_is_cached_and_keeps_its_signature(
        self, digits: Path, cache: ArtifactCache, logged: list[str]
    ) -> None:
        for _ in range(2):
            try:
                lower_version(digits / "1", BF16, cache).session.close()
            except LoweringError:
                assert not has_bf16()
        assert sorted(logged) == ["compiling for openvino on cpu in bf16", "lowering the graph to bf16"]
        (graph,) = (cache.folder / "entries").glob("graph-*/bf16-model.onnx")
        assert read_precision(graph) == "bf16"
        inputs = onnx.load(graph).graph.input
        assert [value.type.tensor_type.elem_type for value in inputs] == [onnx.TensorProto.FLOAT]


class TestCompiled:
    @pytest.mark.parametrize("config", [ORT, OV], ids=["onnxruntime", "openvino"])
    def test_second_start_compiles_nothing_and_computes_the_same(
        self, digits: Path, cache: ArtifactCache, config: SessionConfig, logged: list[str]
    ) -> None:
        feeds = {"INPUT_0": np.random.default_rng(1).normal(size=(3, 1, 32, 32)).astype(np.float32)}
        outputs = []
        for _ in range(2):
            lowered = lower_version(digits / "1", config, cache)
            with lowered.session as session:
                outputs.append(session.run(feeds)["OUTPUT_0"])
        assert logged == [f"compiling for {config}"]
        np.testing.assert_array_equal(outputs[0], outputs[1])

    def test_external_weights_are_part_of_the_key(self, tmp_path: Path, cache: ArtifactCache) -> None:
        weights = {"w": np.ones((4, 4), np.float32)}
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        graph = zoo.model(nodes, [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))], weights)
        folder = zoo.add(tmp_path, "m", graph)
        (folder / "below").mkdir()
        onnx.save(graph, folder / "model.onnx", save_as_external_data=True, location="below/w.bin", size_threshold=0)
        for factor in (1, 2):
            (folder / "below" / "w.bin").write_bytes((weights["w"] * factor).tobytes())
            with lower_version(folder, ORT, cache).session as session:
                assert session.run({"x": np.ones((1, 4), np.float32)})["y"][0, 0] == 4 * factor

    @pytest.mark.parametrize(
        ("fact", "value"),
        [
            ("graphkiln_backend.engines.hardware.identity", lambda _: "another processor"),
            ("openvino.__version__", "1.0"),
        ],
        ids=["device", "version"],
    )
    def test_device_and_engine_version_are_part_of_the_key(
        self,
        digits: Path,
        cache: ArtifactCache,
        monkeypatch: pytest.MonkeyPatch,
        *,
        fact: str,
        value: object,
        logged: list[str],
    ) -> None:
        lower_version(digits / "1", OV, cache).session.close()
        monkeypatch.setattr(fact, value)
        lower_version(digits / "1", OV, cache).session.close()
        assert len(logged) == 2


class TestKeeping:
    def test_temporary_cache_holds_only_lowered_graphs(self, digits: Path, tmp_path: Path) -> None:
        config = replace(ORT, precision=Precision.FP16)
        with ArtifactCache(tmp_path / "c", lasting=False) as cache:
            path = artifacts_of(digits / "1", cache).prepare_graph(config)
            assert path.is_relative_to(tmp_path / "c")
            assert artifacts_of(digits / "1", cache).prepare_compiled(OnnxRuntimeEngine(), config) is None

    def test_graph_replaced_during_lowering_is_not_cached(
        self, digits: Path, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "1"
        folder.mkdir()
        graph = Path(shutil.copy(digits / "1" / "model.onnx", folder))
        artifacts = artifacts_of(folder, cache)
        monkeypatch.setattr(
            "graphkiln_backend.passes.base.run_passes", lambda *_: graph.write_bytes(graph.read_bytes() + b" ")
        )
        with pytest.raises(LoweringError, match=r"model\.onnx was replaced while it was lowered or served"):
            artifacts.prepare_graph(replace(ORT, precision=Precision.FP16))
        assert cache.entries() == []


class TestOutputsThatAreNoTensors:
    def test_graph_is_served_without_outputs_that_are_no_tensors(self, tmp_path: Path, cache: ArtifactCache) -> None:
        folder = zoo.add(tmp_path, "m", zoo.zipped())
        before = sha256_of(folder / "model.onnx")
        proven = lower_version(folder, ORT, cache)
        outputs = proven.session.run({"X": np.array([[9, 0]], np.float32)})
        assert outputs["probability"].shape == (1, 3)
        assert "sequence of maps" in proven.notes[0]
        proven.session.close()
        assert sha256_of(folder / "model.onnx") == before


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


class TestFacts:
    """Caches of users hold these files: other fields or rules need another version of the kind."""

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
    def test_stored_facts_have_a_stable_format(self, tmp_path: Path, kind: Any, fact: Any, document: object) -> None:
        with ArtifactCache(tmp_path) as cache, recall(kind, cache, "m/1", KEY) as memory:
            assert memory.value is None
            memory.keep(fact)
        (file,) = tmp_path.glob(f"entries/{kind.name}-*/{kind.file}")
        assert json.loads(file.read_text()) == document
        with ArtifactCache(tmp_path) as cache, recall(kind, cache, "m/1", KEY) as memory:
            assert memory.value == fact

    def test_format_of_graph_facts(self, graph: Path) -> None:
        x, y = ({"name": name, "dtype": "FP32", "shape": ["n", 3]} for name in "xy")
        assert encode(read_facts(graph)) == {
            "signature": {"inputs": [x], "outputs": [y], "optional_inputs": []},
            "precision": "fp32",
        }

    def test_unreadable_fact_is_measured_again(
        self, cache: ArtifactCache, logged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with recall(OBSERVATIONS, cache, "m/1", KEY) as memory:
            memory.keep(OBSERVED)
        monkeypatch.setattr(json, "loads", lambda _: {"complete": "yes"})
        with recall(OBSERVATIONS, cache, "m/1", KEY) as memory:
            assert memory.value is None
        assert "cannot read" in logged[-1]


class TestGraphFacts:
    @pytest.fixture(autouse=True)
    def _forget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnx_file, "_known", {})

    @pytest.fixture
    def restart(self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        """Start another process with the same cache."""

        def start(path: Path) -> None:
            monkeypatch.setattr(onnx_file, "_known", {})
            onnx_file._read_once.cache_clear()
            with ArtifactCache(cache.folder) as opened:
                recall_graph(path, opened)

        return start

    @pytest.mark.parametrize(("settled_ns", "hashes"), [(0, 1), (3_600_000_000_000, 2)])
    def test_unchanged_file_is_not_hashed_again(
        self,
        cache: ArtifactCache,
        graph: Path,
        restart: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        settled_ns: int,
        hashes: int,
    ) -> None:
        """A recently changed file is hashed again: it may have changed twice within a tick of the clock."""
        read: list[Path] = []
        sha256_of = importing.sha256_of
        monkeypatch.setattr(importing, "sha256_of", lambda path, limit: read.append(path) or sha256_of(path, limit))
        monkeypatch.setattr(importing, "_SETTLED_NS", settled_ns)
        recall_graph(graph, cache)
        known = known_sha256(graph)
        linked = graph.with_name("linked.onnx")
        linked.symlink_to(graph)
        restart(linked)
        assert len(read) == hashes
        assert known_sha256(linked) == known != ""

    def test_changed_file_has_new_facts(
        self, cache: ArtifactCache, graph: Path, restart: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importing, "_SETTLED_NS", -1)
        recall_graph(graph, cache)
        write(graph, width=5)
        restart(graph)
        assert read_signature(graph).inputs[0].shape == ("n", 5)

    @pytest.mark.parametrize("content", [b"damaged", None])
    def test_damaged_graph_is_left_to_the_first_reader(self, cache: ArtifactCache, graph: Path, content: Any) -> None:
        if content:
            graph.write_bytes(content)
        else:
            graph.unlink()
        recall_graph(graph, cache)
        with pytest.raises(RepositoryError, match="is not an ONNX graph"):
            read_signature(graph)

    def test_facts_of_a_graph_with_external_weights_are_not_cached(self, cache: ArtifactCache, graph: Path) -> None:
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

    def test_file_replaced_during_reading_is_not_cached(
        self, cache: ArtifactCache, graph: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def replace_and_read(path: Path) -> Any:
            write(path, width=5)
            return read_facts(path)

        monkeypatch.setattr(importing, "read_facts", replace_and_read)
        recall_graph(graph, cache)
        assert known_facts(graph) is None
        assert not cache.entries()

    def test_unwritable_cache_is_ignored(
        self, cache: ArtifactCache, graph: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("graphkiln_backend.cache.store.make_private", fail)
        recall_graph(graph, cache)
        assert read_signature(graph).inputs[0].shape == ("n", 3)
        assert logged == []
