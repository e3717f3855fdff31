"""Sessions on a real GPU: right by the policy, really there, in the precision, layout and search that were asked for.

Run by scripts/gpu-check; on a machine without a GPU these tests fail, they do not skip.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import CUDA
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import open_source

pytestmark = pytest.mark.gpu

SIDE = 224
FP32, TF32 = Settings(precision=Precision.FP32), Settings(precision=Precision.TF32)


@pytest.fixture(scope="module", params=["resnet101", "mobilenet_v3_large"])
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    """An exported architecture with the CPU's answers as golden samples."""
    graph = tmp_path_factory.mktemp("graphs") / "model.onnx"
    model = open_source(Recipe(source=f"torchvision:{request.param}")).export()
    run_passes(model, OPTIMIZATIONS)
    save(model, graph)
    feeds = {"image": np.random.default_rng(0).normal(size=(4, 3, SIDE, SIDE)).astype(np.float32)}
    with OnnxRuntimeEngine().build_reference(graph) as session:
        answers = session.run(feeds)
    golden = GoldenSamples(inputs=feeds, source_outputs=answers, graph_outputs=answers)
    return ModelVersion(graph_path=graph, manifest=None, golden=golden)


@pytest.fixture
def lowered(version: ModelVersion, cache: ArtifactCache, request: pytest.FixtureRequest) -> Iterator[ProvenSession]:
    """The version on the first GPU, by the test's settings."""
    built = on_gpu(version, request.param, cache)
    with built.session:
        yield built


def on_gpu(version: ModelVersion, settings: Settings, cache: ArtifactCache, device: str = "gpu:0") -> ProvenSession:
    planned = plan(settings, Resources(device=Device.parse(device), cores=2, probe=probe), largest_batch=16)
    artifacts = Artifacts(version, Precision.FP32, cache)
    return select_session(artifacts, planned, Requirements(batch_sizes=(1, 16)))


def test_there_is_a_gpu() -> None:
    assert gpus(), "no GPU: run these tests with scripts/gpu-check on a machine that has one"


@pytest.mark.parametrize(
    "lowered",
    [
        FP32,
        TF32,
        Settings(precision=Precision.FP16),
        Settings(precision=Precision.BF16),
        Settings(precision=Precision.FP16, layout="nhwc"),
        Settings(conv_search="heuristic"),
        Settings(conv_search="exhaustive"),
        Settings(conv_search="default"),
        Settings(options={"onnxruntime": {"enable_cuda_graph": "1"}}),
    ],
    indirect=True,
    ids=["fp32", "tf32", "fp16", "bf16", "fp16-nhwc", "heuristic", "exhaustive", "default", "cuda-graph"],
)
def test_runs_on_cuda_and_passes_its_self_test(lowered: ProvenSession) -> None:
    assert lowered.self_test
    assert lowered.self_test.verdict.endswith("PASS")
    assert lowered.placement
    assert lowered.placement.nodes[CUDA] > 50
    assert not lowered.placement.elsewhere
    precision = lowered.config.precision or "fp32"
    assert lowered.placement.products["fp32" if precision == "tf32" else precision] > 30


def test_fp32_is_more_exact_than_tf32(version: ModelVersion, cache: ArtifactCache) -> None:
    errors = []
    for settings in (FP32, TF32):
        lowered = on_gpu(version, settings, cache)
        lowered.session.close()
        assert lowered.self_test
        errors.append(lowered.self_test.relative_l2)
    assert errors[0] < errors[1] / 3


def test_recorded_runs_answer_as_plain_ones_do(version: ModelVersion, cache: ArtifactCache) -> None:
    plain = on_gpu(version, FP32, cache)
    recorded = on_gpu(version, Settings(options={"onnxruntime": {"enable_cuda_graph": "1"}}), cache)
    generator = np.random.default_rng(3)
    with plain.session, recorded.session:
        for rows in (1, 5, 1, 5):
            feeds = {"image": generator.normal(size=(rows, 3, SIDE, SIDE)).astype(np.float32)}
            want, got = plain.session.run(feeds)["output"], recorded.session.run(feeds)["output"]
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_a_gpu_that_is_not_there_is_named(version: ModelVersion, cache: ArtifactCache) -> None:
    with pytest.raises(LoweringError, match=r"there is no GPU 99 here; GPUs: gpu:0 \("):
        on_gpu(version, FP32, cache, "gpu:99")


def test_tensorrt_runs_or_names_what_is_missing(version: ModelVersion, cache: ArtifactCache) -> None:
    settings = Settings(engine="tensorrt", precision=Precision.FP16)
    if probe("tensorrt", "gpu:0").ok:
        lowered = on_gpu(version, settings, cache)
        lowered.session.close()
        assert list((cache.folder / "entries").glob("tensorrt-*/*.engine"))
    else:
        with pytest.raises(LoweringError, match=r"tensorrt>=10,<11|graphkiln\[gpu\]"):
            on_gpu(version, settings, cache)
