"""What versions' sessions start from: built once, found by everything that it depends on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from lowered import BF16, ORT, OV, artifacts_of, has_bf16, lower_version
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import (
    LoweringError,
)
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import read_precision


class TestLoweredGraph:
    def test_the_lowered_graph_is_made_once_and_keeps_its_signature(
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
    def test_the_second_load_builds_nothing_and_computes_the_same(
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

    def test_weights_in_a_folder_below_are_part_of_the_key(self, tmp_path: Path, cache: ArtifactCache) -> None:
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
    def test_another_device_or_version_has_other_artifacts(
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
    def test_a_cache_that_vanishes_holds_lowered_graphs_for_the_instances(self, digits: Path, tmp_path: Path) -> None:
        config = replace(ORT, precision=Precision.FP16)
        with ArtifactCache(tmp_path / "c", lasting=False) as cache:
            path = artifacts_of(digits / "1", cache).prepare_graph(config)
            assert path.is_relative_to(tmp_path / "c")
            assert artifacts_of(digits / "1", cache).prepare_compiled(OnnxRuntimeEngine(), config) is None

    def test_a_graph_that_is_replaced_while_it_is_lowered_is_not_kept(
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
    def test_a_copy_without_them_serves_and_says_so(self, tmp_path: Path, cache: ArtifactCache) -> None:
        folder = zoo.add(tmp_path, "m", zoo.zipped())
        before = sha256_of(folder / "model.onnx")
        proven = lower_version(folder, ORT, cache)
        outputs = proven.session.run({"X": np.array([[9, 0]], np.float32)})
        assert outputs["probability"].shape == (1, 3)
        assert "sequence of maps" in proven.notes[0]
        proven.session.close()
        assert sha256_of(folder / "model.onnx") == before
