"""Proving a written version again: source model, saved graph, and further samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.engines.base import Support
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable, RepositoryError, VerificationError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.version import ModelVersion, read_version
from graphkiln_converters import verify as verify_module
from graphkiln_converters.prove import ReferenceSamples
from graphkiln_converters.verify import Verified, verify
from graphkiln_converters.write import SourceInfo, prove_and_write

W = draw(4, 3)
INFO = SourceInfo(description="", command="", libraries=(), metrics={}, preprocess=None, labels=())


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    onnx_ir.save(graph("(float[batch,4] x) => (float[batch,3] y) { y = MatMul(x, w) }", w=W), tmp_path / "graph.onnx")
    x = draw(6, 4, seed=1)
    sample = ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W})
    prove_and_write(tmp_path / "graph.onnx", INFO, sample, tmp_path / "m", 1)
    return read_version(tmp_path / "m" / "1")


def run(version: ModelVersion, **options: Any) -> Verified:
    usual: dict[str, Any] = {"engine": "onnxruntime", "precision": None, "samples": None, "threads": 1}
    return verify(version, **{**usual, **options})


def changed(version: ModelVersion, group: str, factor: float) -> ModelVersion:
    """The version with other golden outputs."""
    golden = version.golden
    assert golden is not None
    outputs = {name: array * np.float32(factor) for name, array in getattr(golden, group).items()}
    return replace(version, golden=replace(golden, **{group: outputs}))


class TestGolden:
    @pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
    def test_both_references_are_compared(self, version: ModelVersion, engine: str) -> None:
        verified = run(version, engine=engine)
        assert [verdict.step for verdict in verified.verdicts] == [
            f"fp32 on {engine}, source model",
            f"fp32 on {engine}, saved graph",
        ]
        assert all(verdict.batch_sizes == (1, 2, 5) for verdict in verified.verdicts)
        assert verified.placement is not None
        assert verified.placement.precision == "fp32"

    @pytest.mark.parametrize("group", ["source_outputs", "graph_outputs"])
    def test_a_difference_from_either_reference_is_refused(self, version: ModelVersion, group: str) -> None:
        with pytest.raises(VerificationError, match="the outputs changed"):
            run(changed(version, group, 1.01))

    def test_another_engine_may_round_differently(self, version: ModelVersion) -> None:
        """More than the row of an export allows."""
        (beside_source, _) = run(changed(version, "source_outputs", 1 + 5e-5)).verdicts
        assert 1e-5 < beside_source.relative_l2 < 1e-4


class TestSamples:
    def save(self, path: Path, **arrays: Any) -> Path:
        np.savez(path, **arrays)
        return path

    def test_samples_are_compared_with_the_reference_engine(self, version: ModelVersion, tmp_path: Path) -> None:
        path = self.save(tmp_path / "s.npz", x=draw(20, 4, seed=3))
        verdict = run(version, samples=path).verdicts[-1]
        assert (verdict.step, verdict.samples) == ("fp32 on onnxruntime, your samples", 20)
        assert "20" in verdict.verdict

    def test_samples_are_sufficient_for_a_graph_without_a_manifest(self, version: ModelVersion, tmp_path: Path) -> None:
        bare = ModelVersion(graph_path=version.graph_path, manifest=None, golden=None)
        verified = run(bare, samples=self.save(tmp_path / "s.npz", x=draw(7, 4)))
        assert (len(verified.verdicts), verified.placement) == (1, None)

    def test_infinite_scores_do_not_raise_the_noise(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "(float[batch,4] x) => (float[batch,4] y, float[batch,4] z) { y = Log(x) z = Identity(x) }"
        onnx_ir.save(graph(text), tmp_path / "model.onnx")
        noise: list[float] = []
        monkeypatch.setattr(verify_module, "prove", lambda *_, **kwargs: noise.append(kwargs["noise"]))
        path = self.save(tmp_path / "s.npz", x=np.array([[0, 1, 2, 3]], np.float32))
        run(ModelVersion(graph_path=tmp_path / "model.onnx", manifest=None, golden=None), samples=path)
        assert noise == [pytest.approx(3e-5)]

    def test_samples_of_other_inputs_are_refused(self, version: ModelVersion, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="lack input x"):
            run(version, samples=self.save(tmp_path / "s.npz", z=draw(7, 4)))

    def test_a_graph_without_references_is_refused(self, version: ModelVersion) -> None:
        with pytest.raises(VerificationError, match="has no golden samples") as caught:
            run(ModelVersion(graph_path=version.graph_path, manifest=None, golden=None))
        assert "--samples" in caught.value.hint


class TestEngines:
    def test_an_engine_that_cannot_run_here_is_reported(
        self, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OnnxRuntimeEngine, "probe", lambda *_: Support(ok=False, reason="no such instructions"))
        with pytest.raises(EngineUnavailable, match="no such instructions"):
            run(version)


class TestPublication:
    def test_a_contradicting_configuration_is_refused(self, version: ModelVersion) -> None:
        config = version.graph_path.parent.parent / "config.pbtxt"
        config.write_text(config.read_text().replace("dims: 3", "dims: 5"))
        with pytest.raises(RepositoryError, match=r"dims .* of output 'y' do not fit the graph"):
            run(version)

    def test_a_preprocess_in_the_configuration_is_overridden(self, version: ModelVersion) -> None:
        config = version.graph_path.parent.parent / "config.pbtxt"
        spec = Preprocess(resize=8).to_json().replace('"', '\\"')
        with config.open("a") as file:
            file.write(f'parameters {{ key: "preprocess" value {{ string_value: "{spec}" }} }}')
        assert run(version).verdicts
