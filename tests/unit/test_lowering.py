"""Versions, engines and lowering on the committed example, without a server."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from lowered import cpu, lower_version

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import cores
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import engine_names, load_engine
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.lowering.plan import LoweringPlan, plan
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.version import read_version

STEP = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture
def version_folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "1")


class TestOnnxRuntime:
    def test_runs_and_reports_its_signature(self, digits: Path) -> None:
        with OnnxRuntimeEngine().build(digits / "1" / "model.onnx", STEP) as session:
            (spec,) = session.signature.inputs
            assert (spec.name, spec.dtype, spec.shape) == ("INPUT_0", DType.FP32, ("batch", 1, 32, 32))
            scores = session.run({"INPUT_0": np.zeros((3, 1, 32, 32), np.float32)})["OUTPUT_0"]
        np.testing.assert_allclose(scores.sum(axis=1), np.ones(3), rtol=1e-5)

    def test_reads_back_what_ran_where(self, digits: Path) -> None:
        with OnnxRuntimeEngine().build(digits / "1" / "model.onnx", STEP) as session:
            placement = session.placement({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
        assert set(placement.nodes) == {"CPUExecutionProvider"}
        assert placement.nodes["CPUExecutionProvider"] >= 5
        assert placement.precision == "fp32"

    @pytest.mark.parametrize("content", [b"", b"nonsense", None])
    def test_a_damaged_graph_is_a_lowering_error(self, version_folder: Path, content: bytes | None) -> None:
        graph = version_folder / "model.onnx"
        graph.write_bytes(graph.read_bytes()[:5000] if content is None else content)
        with pytest.raises(LoweringError, match="cannot load"):
            OnnxRuntimeEngine().build(graph, STEP)

    def test_a_wrong_input_is_a_signature_error(self, digits: Path) -> None:
        with (
            OnnxRuntimeEngine().build(digits / "1" / "model.onnx", STEP) as session,
            pytest.raises(SignatureError, match="ONNX Runtime refuses"),
        ):
            session.run({"INPUT_0": np.zeros((1, 2, 32, 32), np.float32)})

    def test_does_not_claim_other_devices(self) -> None:
        assert not OnnxRuntimeEngine().probe(Device.gpu(0)).ok


class TestRegistry:
    def test_the_built_in_engines_are_entry_points(self) -> None:
        assert "onnxruntime" in engine_names()
        assert isinstance(load_engine("onnxruntime"), OnnxRuntimeEngine)

    def test_an_unknown_engine_names_the_nearest(self) -> None:
        with pytest.raises(EngineUnavailable, match="did you mean 'onnxruntime'"):
            load_engine("onnxrutime")


class TestLower:
    PLAN = plan(Settings(), cpu())

    def test_the_example_passes_its_self_test(self, digits: Path, cache: ArtifactCache) -> None:
        lowered = lower_version(digits / "1", self.PLAN, cache)
        with lowered.session:
            assert lowered.self_test is not None
            assert lowered.self_test.verdict.endswith("PASS")
            assert lowered.placement is not None
            assert lowered.placement.precision == "fp32"

    def test_a_graph_that_answers_otherwise_does_not_go_live(self, version_folder: Path, cache: ArtifactCache) -> None:
        version = read_version(version_folder)
        assert version.golden
        scores = version.golden.graph_outputs["OUTPUT_0"] * np.float32(1.01)
        golden = GoldenSamples(
            inputs=version.golden.inputs,
            source_outputs=version.golden.source_outputs,
            graph_outputs={"OUTPUT_0": scores},
        )
        golden.write(version_folder / "golden.npz")
        manifest = (version_folder / "manifest.json").read_text()
        assert version.manifest
        assert version.manifest.golden
        (version_folder / "manifest.json").write_text(
            manifest.replace(version.manifest.golden.sha256, sha256_of(version_folder / "golden.npz"))
        )
        with pytest.raises(LoweringError, match="the outputs changed"):
            lower_version(version_folder, self.PLAN, cache)

    def test_a_manifest_of_other_tensors_is_refused(self, version_folder: Path, cache: ArtifactCache) -> None:
        manifest = version_folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace("OUTPUT_0", "SCORES"))
        with pytest.raises(LoweringError, match=r"the manifest's outputs are not the graph's"):
            lower_version(version_folder, self.PLAN, cache)

    def test_says_what_every_attempt_came_to(self, digits: Path, cache: ArtifactCache) -> None:
        steps = (
            SessionConfig(engine="nonesuch", device=CPU, threads=1, spin=False, reason="test"),
            SessionConfig(engine="onnxruntime", device=Device.gpu(7), threads=1, spin=False, reason="test"),
        )
        with pytest.raises(LoweringError) as caught:
            lower_version(digits / "1", LoweringPlan(candidates=steps[:1], fallback=steps[1:]), cache)
        first, second = caught.value.attempts
        assert "unknown engine 'nonesuch'" in first
        assert "gpu:7" in second

    def test_a_bare_graph_is_served_and_its_placement_read(self, version_folder: Path, cache: ArtifactCache) -> None:
        (version_folder / "manifest.json").unlink()
        lowered = lower_version(version_folder, self.PLAN, cache)
        with lowered.session:
            assert lowered.self_test is None
            assert lowered.placement is not None


class TestCores:
    @pytest.mark.parametrize(
        ("content", "expected"), [("max 100000", 64), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64)]
    )
    def test_the_quota_of_a_container_counts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, expected: int
    ) -> None:
        (tmp_path / "cpu.max").write_text(content + "\n")
        monkeypatch.setattr(cores, "_CGROUP_V2", tmp_path / "cpu.max")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == expected

    def test_the_older_files_count_too(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "cpu.cfs_quota_us").write_text("300000\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
        monkeypatch.setattr(cores, "_CGROUP_V2", tmp_path / "none")
        monkeypatch.setattr(cores, "_CGROUP_V1", tmp_path)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == 3

    def test_the_affinity_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {5})
        assert cores.usable_cores() == 1
