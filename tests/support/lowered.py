"""Build sessions of versions in tests without a server, with a separate cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import LoweringPlan, Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.repository.version import read_version

ORT = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
OV = replace(ORT, engine="openvino")
BF16 = replace(OV, precision=Precision.BF16)


def has_bf16() -> bool:
    """True if this machine's CPU computes in bf16."""
    facts = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in facts or "amx_bf16" in facts


bf16_only = pytest.mark.skipif(not has_bf16(), reason="this CPU does not compute in bf16")


def cpu(cores: int = 2, instances: int = 1) -> Resources:
    """This machine's CPU as a device of a plan."""
    return Resources(device=CPU, cores=cores, probe=probe, instances=instances)


def lower_version(
    folder: Path,
    plan: LoweringPlan | SessionConfig,
    cache: ArtifactCache,
    *,
    batch_sizes: tuple[int, ...] = (1,),
    self_test: bool = True,
) -> ProvenSession:
    """Build the session of a version folder with a plan, or with one configuration."""
    configs = plan if isinstance(plan, LoweringPlan) else LoweringPlan(candidates=(plan,))
    requirements = Requirements(batch_sizes=batch_sizes, self_test=self_test)
    return select_session(artifacts_of(folder, cache), configs, requirements)


def artifacts_of(folder: Path, cache: ArtifactCache) -> Artifacts:
    """Artifacts of a version folder."""
    version = read_version(folder)
    return Artifacts(version, saved_precision(version), cache)


def add_unrunnable(store: Path) -> Path:
    """Write a version whose graph fails on a zero."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs, outputs = [zoo.value("x", ("n",))], [zoo.value("y", (3, "m"))]
    return zoo.add(store, "unrunnable", zoo.model(nodes, inputs, outputs, {"shape": np.array([3, -1], np.int64)}))


def write_graph(path: Path, *outputs: str) -> None:
    """Write a graph that doubles its input into each output."""
    nodes = [helper.make_node("Add", ["x", "x"], [name]) for name in outputs]
    proto = zoo.model(nodes, [zoo.value("x", ("batch", 3))], [zoo.value(name, ("batch", 3)) for name in outputs])
    path.write_bytes(proto.SerializeToString())
