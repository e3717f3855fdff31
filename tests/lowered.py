"""Lowers versions in tests without a server, with a cache of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graphkiln_backend.engines.base import Step
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.cache import ArtifactCache
from graphkiln_backend.lowering.lower import Lowered, Wanted, lower
from graphkiln_backend.lowering.plan import LoweringPlan, Machine
from graphkiln_backend.repository.version import read_version


def cpu(cores: int = 2, instances: int = 1) -> Machine:
    """This machine's CPU, as a plan sees it."""
    return Machine(device="cpu", cores=cores, probe=probe, instances=instances)


def lower_version(
    folder: Path,
    plan: LoweringPlan | Step,
    cache: ArtifactCache,
    *,
    warm_sizes: tuple[int, ...] = (1,),
    self_test: bool = True,
    report: Callable[[str], None] = lambda _: None,
    building: Callable[[str], None] = lambda _: None,
) -> Lowered:
    """Lowers a version folder by a plan, or by one step."""
    version = read_version(folder)
    steps = plan if isinstance(plan, LoweringPlan) else LoweringPlan(candidates=(plan,))
    artifacts = Artifacts(version, saved_precision(version), cache, building)
    return lower(version, steps, Wanted(artifacts=artifacts, warm_sizes=warm_sizes, self_test=self_test, report=report))
