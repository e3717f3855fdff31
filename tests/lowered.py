"""Builds sessions of versions in tests without a server, with a cache of their own."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.plan import LoweringPlan, Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.repository.version import read_version


def cpu(cores: int = 2, instances: int = 1) -> Resources:
    """This machine's CPU, as a plan sees it."""
    return Resources(device=CPU, cores=cores, probe=probe, instances=instances)


def lower_version(
    folder: Path,
    plan: LoweringPlan | SessionConfig,
    cache: ArtifactCache,
    *,
    warm_sizes: tuple[int, ...] = (1,),
    self_test: bool = True,
) -> ProvenSession:
    """The session of a version folder by a plan, or by one configuration."""
    version = read_version(folder)
    configs = plan if isinstance(plan, LoweringPlan) else LoweringPlan(candidates=(plan,))
    artifacts = Artifacts(version, saved_precision(version), cache)
    return select_session(artifacts, configs, Requirements(batch_sizes=warm_sizes, self_test=self_test))
