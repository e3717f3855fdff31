"""Sessions of models that are spread over groups of cores, built and proven as the server does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.parallelism import Parallelism
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession
from graphkiln_backend.lowering.parallel.shards import ShardedSession
from graphkiln_backend.lowering.parallel.sums import Sums, Tensor
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.lowering.spreading import Spread, spread_model
from graphkiln_backend.repository.version import ModelVersion

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """How an instance of a model would run.

    Attributes:
        version: The model.
        settings: What is requested.
        resources: What it runs on.
        spread: How it is spread; None for the whole model on all cores.
        largest_batch: The largest batch that it will run.
    """

    version: ModelVersion
    settings: Settings
    resources: Resources
    spread: Spread | None
    largest_batch: int


def plan_instance(
    version: ModelVersion,
    numbers: Parallelism | None,
    *,
    cores: int,
    largest_batch: int,
    instances: int = 1,
    instance: int = 0,
) -> Planned:
    """Plans one instance, in fp32 on the CPU.

    Args:
        version: The model.
        numbers: How it is spread.
        cores: That all instances may use.
        largest_batch: Of its requests.
        instances: Of the model.
        instance: Which of them this is.

    Raises:
        LoweringError: It cannot be spread so.
    """
    resources = Resources(device=CPU, cores=cores, probe=probe, instances=instances, instance=instance)
    settings = Settings(parallel=numbers)
    spread = None
    if numbers:
        spread = spread_model(numbers, settings, version, resources, saved=Precision.FP32, largest_batch=largest_batch)
        settings, resources = spread.apply(settings, resources)
    return Planned(version=version, settings=settings, resources=resources, spread=spread, largest_batch=largest_batch)


class Stopwatch:
    """Seconds of calls, added up; for one thread at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls, and takes the time."""
        begun = time.perf_counter()
        found = call(*args, **kwargs)
        self.seconds += time.perf_counter() - begun
        return found


class TimedSums:
    """Sums of shards, and how long adding them up takes; waiting for the slowest shard is not in it.

    Args:
        sums: What adds.
        watch: Takes the time.
    """

    def __init__(self, sums: Sums, watch: Stopwatch) -> None:
        self._sums = sums
        self._watch = watch
        self.run = sums.run
        self.fetch = sums.fetch

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Sums.add`."""
        return self._watch.time(self._sums.add, partials)


def time_sums(session: Session, watch: Stopwatch) -> bool:
    """Takes the time of the sums of a split session from now on; whether it has any.

    Args:
        session: Not running now.
        watch: Takes it.
    """
    stages = [stage.session for stage in session.stages] if isinstance(session, PipelineSession) else []
    sharded = [stage for stage in stages if isinstance(stage, ShardedSession)]
    for stage in sharded:
        stage.sums = TimedSums(stage.sums, watch)
    return bool(sharded)


def prove(
    planned: Planned, cache: ArtifactCache, *, batch_sizes: tuple[int, ...], self_test: bool = True
) -> ProvenSession:
    """Builds what was planned, and proves it: beside golden samples, or else beside the whole graph.

    Args:
        planned: The instance.
        cache: Where artifacts are kept.
        batch_sizes: What it will be asked for.
        self_test: Whether it is compared with anything.

    Raises:
        LoweringError: It cannot be built, or computes something else.
    """
    artifacts = Artifacts(planned.version, Precision.FP32, cache)
    configs = plan(planned.settings, planned.resources, largest_batch=planned.largest_batch)
    return select_session(artifacts, configs, Requirements(batch_sizes=batch_sizes, self_test=self_test))
