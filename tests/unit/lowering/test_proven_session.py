"""Sessions are proven before they serve: precision, placement and golden outputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zoo
from lowered import BF16, ORT, add_unrunnable, bf16_only, cpu, lower_version

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import REWRITES_OFF, Placement, Support
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.engines.openvino import OpenVinoSession
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    LoweringError,
    VerificationError,
)
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest, sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.plan import plan
from graphkiln_backend.lowering.proven_session import ProvenSession, build_proven_session
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.repository.version import ModelVersion, read_version


@pytest.fixture
def version_folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "1")


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


class TestProof:
    PLAN = plan(Settings(), cpu())

    def test_graph_with_wrong_outputs_does_not_serve(self, version_folder: Path, cache: ArtifactCache) -> None:
        version = read_version(version_folder)
        assert version.golden
        scores = version.golden.graph_outputs["OUTPUT_0"] * np.float32(1.01)
        golden = GoldenSamples(
            inputs=version.golden.inputs,
            source_outputs=version.golden.source_outputs,
            graph_outputs={"OUTPUT_0": scores},
        )
        golden.write(version_folder / "golden.npz")
        assert version.manifest
        assert version.manifest.golden
        recorded = replace(version.manifest.golden, sha256=sha256_of(version_folder / "golden.npz"))
        replace(version.manifest, golden=recorded).write(version_folder / "manifest.json")
        with pytest.raises(LoweringError, match="the outputs changed"):
            lower_version(version_folder, self.PLAN, cache)

    def test_manifest_with_other_tensors_is_refused(self, version_folder: Path, cache: ArtifactCache) -> None:
        path = version_folder / "manifest.json"
        manifest = Manifest.read(path)
        outputs = tuple(replace(spec, name="SCORES") for spec in manifest.signature.outputs)
        replace(manifest, signature=replace(manifest.signature, outputs=outputs)).write(path)
        with pytest.raises(LoweringError, match=r"those of the manifest"):
            lower_version(version_folder, self.PLAN, cache)


class TestPrecisionAtLoad:
    @bf16_only
    def test_bf16_is_computed_in_bf16_and_proven(self, digits: Path, cache: ArtifactCache) -> None:
        lowered = lower_version(digits / "1", BF16, cache, batch_sizes=(1, 8))
        with lowered.session:
            assert lowered.placement
            assert lowered.placement.products == {"bf16": 5}
            assert lowered.self_test
            assert lowered.self_test.batch_sizes == (1, 8)
            assert 1e-5 < lowered.self_test.relative_l2 < lowered.self_test.relative_l2_limit == 0.1


class TestPlacement:
    def test_no_product_in_the_requested_precision(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="no product ran in bf16; 9 nodes on CPU; products: 5 in fp32"):
            lower_version(digits / "1", BF16, cache)

    def test_products_on_another_device(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OnnxRuntimeSession, "placement", placed(products={"fp32": 5}, elsewhere=("conv1",)))
        with pytest.raises(LoweringError, match=r"1 products ran on another device.*the first: conv1"):
            lower_version(digits / "1", ORT, cache)

    def test_precision_that_cannot_be_read_back(self, tmp_path: Path, cache: ArtifactCache) -> None:
        folder = add_unrunnable(tmp_path)
        assert lower_version(folder, ORT, cache).placement is None
        with pytest.raises(LoweringError, match=r"cannot verify the precision.*graphkiln convert"):
            lower_version(folder, replace(ORT, precision=Precision.FP32), cache)


class TestSelfTest:
    def test_wrong_outputs_in_large_batches_only(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = OnnxRuntimeSession.run

        def wrong(self: OnnxRuntimeSession, feeds: Mapping[str, AnyArray], outputs: None = None) -> dict[str, AnyArray]:
            outputs = run(self, feeds, outputs)
            return {name: array * (1.01 if len(array) == 8 else 1) for name, array in outputs.items()}

        monkeypatch.setattr(OnnxRuntimeSession, "run", wrong)
        lower_version(digits / "1", ORT, cache, batch_sizes=(1, 4)).session.close()
        with pytest.raises(LoweringError, match="the outputs changed"):
            lower_version(digits / "1", ORT, cache, batch_sizes=(1, 8))
        lowered = lower_version(digits / "1", ORT, cache, batch_sizes=(1, 8), self_test=False)
        lowered.session.close()
        assert lowered.self_test is None
        assert lowered.notes == ("self_test: off: the golden samples were not replayed",)


class TestRewrites:
    """ONNX Runtime's own rewrites may change what a graph computes, or make it fail."""

    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("saved_too", [False, True])
    def test_changed_graph_is_proven_as_saved(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, fails: bool, saved_too: bool
    ) -> None:
        run = OnnxRuntimeSession.run
        off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

        def wrong(self: OnnxRuntimeSession, feeds: Mapping[str, AnyArray], outputs: None = None) -> dict[str, AnyArray]:
            found = run(self, feeds, outputs)
            if self._options.graph_optimization_level == off and not saved_too:
                return found
            if fails:
                raise ExecutionError("a fused node failed")
            return {name: array * 1.01 for name, array in found.items()}

        monkeypatch.setattr(OnnxRuntimeSession, "run", wrong)
        reason = "a fused node failed" if fails else "the outputs changed"
        if saved_too:
            with pytest.raises(LoweringError, match=reason):
                lower_version(digits / "1", ORT, cache)
            return
        lowered = lower_version(digits / "1", ORT, cache)
        with lowered.session:
            assert lowered.self_test
            assert lowered.notes[0].startswith(REWRITES_OFF)
            assert reason in lowered.notes[0]
            assert lowered.config.tuning.graph_level == "off"

    def test_request_that_only_the_saved_graph_accepts(
        self, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = OnnxRuntimeSession.run

        def fail(self: OnnxRuntimeSession, feeds: Mapping[str, AnyArray], outputs: None = None) -> dict[str, AnyArray]:
            if self._options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
                raise ExecutionError("a fused node failed")
            return run(self, feeds, outputs)

        monkeypatch.setattr(OnnxRuntimeSession, "run", fail)
        lowered = lower_version(zoo.add(tmp_path, "m", zoo.scale(("n", 3))), ORT, cache)
        with lowered.session:
            assert lowered.notes[0].startswith(REWRITES_OFF)
            assert "a fused node failed" in lowered.notes[0]

    def test_note_of_the_session(self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OnnxRuntimeSession, "notes", property(lambda _: ("as saved",), lambda *_: None), False)
        lowered = lower_version(digits / "1", ORT, cache)
        with lowered.session:
            assert lowered.notes == ("as saved",)


class TestBuilding:
    @pytest.fixture
    def build(self, version: ModelVersion, cache: ArtifactCache) -> Callable[..., ProvenSession]:
        def build(engine: Any, version: ModelVersion = version, **requirements: Any) -> ProvenSession:
            artifacts = Artifacts(version, Precision.FP32, cache)
            return build_proven_session(artifacts, engine.config, Requirements(**requirements))

        return build

    def test_session_is_proven_then_warmed_up(self, add_engine: Any, build: Any) -> None:
        engine = add_engine("engine")
        proven = build(engine, batch_sizes=(1, 4))
        assert proven.session is engine.sessions[0]
        assert proven.config == engine.config
        assert proven.self_test.batch_sizes == (1, 4)
        replayed, warmed = [1, 1, 1, 4], [1, 2, 2]
        assert engine.sessions[0].batches == [*replayed, *warmed]
        assert (proven.notes, proven.failures, proven.slower) == ((), (), ())
        assert proven.warmup_s >= 0

    def test_unavailable_engine_builds_nothing(self, add_engine: Any, build: Any) -> None:
        engine = add_engine("engine", support=Support(ok=False, reason="there is no GPU"))
        with pytest.raises(EngineUnavailable, match="there is no GPU"):
            build(engine)
        assert engine.sessions == []

    @pytest.mark.parametrize("fault", ["signature", "placement", "outputs", "run"])
    def test_a_session_that_fails_its_proof_is_closed(
        self, add_engine: Any, build: Any, version: ModelVersion, digits: Path, fault: str
    ) -> None:
        engine = add_engine("engine")
        match fault:
            case "signature":
                version = replace(version, manifest=Manifest.read(digits / "1" / "manifest.json"))
            case "placement":
                engine.placement = replace(engine.placement, elsewhere=("conv",))
            case "outputs":
                engine.factor = 3.0
            case "run":
                engine.run_error = ExecutionError("no memory")
        with pytest.raises(GraphkilnError):
            build(engine, version)
        assert [session.closed for session in engine.sessions] == [1]

    def test_without_golden_samples_requests_are_made_up(self, add_engine: Any, build: Any, bare: ModelVersion) -> None:
        engine = add_engine("engine")
        proven = build(engine, bare, batch_sizes=(1, 2))
        assert (proven.self_test, proven.notes) == (None, ())
        # Compared with the saved graph, the same request twice, warmed up,
        # kept for replays, and four rows, each alone once, then together.
        assert engine.sessions[0].batches == [*[1] * 6, *[1, 2, 2], *[1] * 3, *[1] * 4, 4]
        assert proven.synthetic == SyntheticInputs()
        assert not proven.separate


class TestLaterStarts:
    @pytest.fixture
    def start(self, tmp_path: Path) -> Callable[..., ProvenSession]:
        def start(engine: Any, version: ModelVersion, **requirements: Any) -> ProvenSession:
            with ArtifactCache(tmp_path / "cache") as cache:
                artifacts = Artifacts(version, Precision.FP32, cache)
                return build_proven_session(artifacts, engine.config, Requirements(**requirements))

        return start

    def test_observations_are_made_once(self, add_engine: Any, start: Any, bare: ModelVersion) -> None:
        engine = add_engine("engine", facts={"release": "1"})
        first, later = start(engine, bare, batch_sizes=(1, 4)), start(engine, bare, batch_sizes=(1, 4))
        assert [session.placements for session in engine.sessions] == [1, 0]
        assert later.placement == first.placement
        # The session is still compared with the saved graph; two more runs record its replay.
        assert engine.sessions[1].batches == [*[1] * 4, 4, *[1] * 2]
        assert later.replay is not None

    def test_golden_samples_are_replayed_at_every_start(
        self, add_engine: Any, start: Any, version: ModelVersion
    ) -> None:
        engine = add_engine("engine", facts={"release": "1"})
        start(engine, version, batch_sizes=(1, 4))
        start(engine, version, batch_sizes=(1, 4))
        assert engine.sessions[1].batches == [1, 1, 1, 4]
        engine.factor = 3.0
        with pytest.raises(VerificationError):
            start(engine, version, batch_sizes=(1, 4))

    def test_mixed_rows_are_remembered(
        self, add_engine: Any, start: Any, bare: ModelVersion, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = add_engine("engine", facts={"release": "1"})
        monkeypatch.setattr("graphkiln_backend.lowering.proven_session.find_mixed_rows", lambda *_: "mixed")
        proven = [start(engine, bare, batch_sizes=(1, 4)) for _ in range(2)]
        assert [(each.separate, each.notes) for each in proven] == [
            (True, ("requests are computed one by one: mixed",))
        ] * 2

    @pytest.mark.parametrize("what", ["graph", "release", "batch", "self-test"])
    def test_observations_depend_on_their_conditions(
        self, add_engine: Any, start: Any, bare: ModelVersion, what: str
    ) -> None:
        engine = add_engine("engine", facts={"release": "1"})
        start(engine, bare, batch_sizes=(1, 4))
        if what == "graph":
            document = b"\x32\x01?"  # ModelProto.doc_string
            bare.graph_path.write_bytes(bare.graph_path.read_bytes() + document)
        if what == "release":
            engine.facts = {"release": "2"}
        sizes = (1, 8) if what == "batch" else (1, 4)
        start(engine, bare, batch_sizes=sizes, self_test=what != "self-test")
        assert [session.placements for session in engine.sessions] == [1, 1]

    def test_known_placement_is_checked_again(self, add_engine: Any, start: Any, bare: ModelVersion) -> None:
        engine = add_engine("engine", facts={"release": "1"})
        engine.placement = replace(engine.placement, elsewhere=("conv",))
        for _ in range(2):
            with pytest.raises(LoweringError, match="1 products ran on another device"):
                start(engine, bare)
