"""Sessions are proven before they serve: precision, placement and golden outputs, on real ones of the example."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lowered import BF16, ORT, OV, add_unrunnable, bf16_only, cpu, has_bf16, lower_version

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.engines.openvino import OpenVinoSession
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import plan
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.version import read_version


@pytest.fixture
def version_folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "1")


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


class TestProof:
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

    def test_a_bare_graph_is_served_and_its_placement_read(self, version_folder: Path, cache: ArtifactCache) -> None:
        (version_folder / "manifest.json").unlink()
        lowered = lower_version(version_folder, self.PLAN, cache)
        with lowered.session:
            assert lowered.self_test is None
            assert lowered.placement is not None


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

    @pytest.mark.skipif(has_bf16(), reason="this CPU computes in bf16")
    def test_a_cpu_without_bf16_is_a_load_error(self, digits: Path, cache: ArtifactCache) -> None:
        with pytest.raises(LoweringError, match="no product ran in bf16"):
            lower_version(digits / "1", BF16, cache)


class TestExecutionProof:
    """Sessions that say they ran something else than was requested must not serve."""

    def test_no_product_in_the_precision(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="no product ran in bf16; 9 nodes on CPU; products: 5 in fp32"):
            lower_version(digits / "1", BF16, cache)

    def test_fp16_on_a_cpu_recommends_bf16(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="a CPU computes fp16 in fp32; bf16 is the precision that pays"):
            lower_version(digits / "1", replace(OV, precision=Precision.FP16), cache)

    def test_products_that_fell_back_to_another_device(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OnnxRuntimeSession, "placement", placed(products={"fp32": 5}, elsewhere=("conv1",)))
        with pytest.raises(LoweringError, match=r"1 products ran elsewhere.*the first: conv1"):
            lower_version(digits / "1", ORT, cache)

    def test_what_cannot_be_read_back_is_not_believed(self, tmp_path: Path, cache: ArtifactCache) -> None:
        folder = add_unrunnable(tmp_path)
        assert lower_version(folder, ORT, cache).placement is None
        with pytest.raises(LoweringError, match=r"cannot be read back.*graphkiln convert"):
            lower_version(folder, replace(ORT, precision=Precision.FP32), cache)

    def test_counts_are_read_from_both_runtimes(self, digits: Path, cache: ArtifactCache) -> None:
        for config in (ORT, OV):
            lowered = lower_version(digits / "1", replace(config, precision=Precision.FP32), cache)
            lowered.session.close()
            assert lowered.placement
            assert lowered.placement.products == {"fp32": 5}
            assert not lowered.placement.elsewhere


class TestSelfTest:
    def test_a_session_that_fails_in_large_batches_only_is_caught(
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
