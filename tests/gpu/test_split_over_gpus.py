"""One model over two real GPUs: the answers of the whole graph, by NCCL between shards, and the same bits each time.

Run by scripts/gpu-check. A machine with one GPU cannot tell, and says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import split_graphs
from graphs import draw

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.engines.registry import open_reference, probe
from graphkiln_backend.graph.device import Device, Parallelism
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.parallel.spreading import spread_model
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.version import ModelVersion, read_version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(gpus()) == 1, reason="one GPU is here: two are needed")]

BATCH = 4


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    """A block of a transformer with what the reference computes."""
    path = split_graphs.save(split_graphs.attention(), tmp_path / "store" / "m" / "1")
    x = draw(3, 5, 24, seed=5)
    with open_reference(path) as reference:
        y = reference.run({"x": x})["y"]
    golden = GoldenSamples(inputs={"x": x}, source_outputs={"y": y}, graph_outputs={"y": y})
    return replace(read_version(path.parent), golden=golden)


@pytest.mark.parametrize("numbers", [Parallelism(tensor=2), Parallelism(pipeline=2, micro_batches=2)], ids=str)
def test_two_gpus_give_the_answers_of_the_whole_graph(
    version: ModelVersion, cache: ArtifactCache, numbers: Parallelism, logged: list[str]
) -> None:
    settings, resources = Settings(parallel=numbers), Resources(device=Device.gpu(0), cores=2, probe=probe)
    spread = spread_model(numbers, settings, version, resources, saved=Precision.FP32, largest_batch=BATCH)
    configs = plan(*spread.apply(settings, resources), largest_batch=BATCH)
    proven = select_session(Artifacts(version, Precision.FP32, cache), configs, Requirements(batch_sizes=(1, BATCH)))
    assert version.golden
    with proven.session as session:
        assert proven.self_test
        assert proven.self_test.verdict.endswith("PASS")
        first, *others = (session.run(version.golden.inputs)["y"] for _ in range(3))
        for other in others:
            np.testing.assert_array_equal(other, first)
    assert not any("host memory" in line for line in logged), "NCCL was not used"
