"""From a version folder and its configuration to a session: the one path that the server and the commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.plan import LoweringPlan, Resources, plan
from graphkiln_backend.lowering.selection import Lowered, Requirements, lower
from graphkiln_backend.lowering.settings import Override, Settings
from graphkiln_backend.lowering.warmup import batch_sizes
from graphkiln_backend.repository.version import ModelVersion, read_version


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A version, what is asked of it, and how it will be brought there.

    Attributes:
        version: The graph and what is known of it.
        settings: What its configuration and the command line ask for.
        plan: The steps to try.
        saved: Precision that the graph was saved in.
        warm_sizes: The batch sizes that Triton will form.
    """

    version: ModelVersion
    settings: Settings
    plan: LoweringPlan
    saved: Precision
    warm_sizes: tuple[int, ...]

    @classmethod
    def read(
        cls, folder: Path, config: Mapping[str, Any], machine: Resources, overrides: Sequence[Override] = ()
    ) -> Deployment:
        """Reads a version and plans it.

        Args:
            folder: The version folder.
            config: As Triton gives it to a Python backend, complete.
            machine: Where it will run; its `instances` are taken from the configuration.
            overrides: What the command line asks for.

        Raises:
            GraphkilnError: The version or its configuration is not usable, or nothing can run it as it is asked for.
        """
        settings = Settings.from_config(config, gpu=machine.device.is_gpu, overrides=overrides)
        version = read_version(folder, config.get("default_model_filename", ""))
        saved = saved_precision(version)
        sizes = _warm_sizes(config)
        machine = replace(machine, instances=_instances(config))
        return cls(
            version=version,
            settings=settings,
            plan=plan(settings, machine, saved=saved, largest_batch=max(sizes)),
            saved=saved,
            warm_sizes=sizes,
        )

    def lower(self, cache: ArtifactCache) -> Lowered:
        """Builds, proves and warms the session that will answer.

        Args:
            cache: Where artifacts are kept.

        Raises:
            LoweringError: No step worked.
        """
        artifacts = Artifacts(self.version, self.saved, cache)
        return lower(
            self.version,
            self.plan,
            Requirements(
                artifacts=artifacts,
                warm_sizes=self.warm_sizes,
                self_test=self.settings.self_test,
            ),
        )


def _instances(config: Mapping[str, Any]) -> int:
    """Instances of the model on this machine: Triton fills in the count of every group."""
    return max(1, sum(int(group.get("count", 1)) for group in config.get("instance_group", [])))


def _warm_sizes(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The batch sizes that Triton will form by this configuration."""
    largest = int(config.get("max_batch_size", 0))
    if largest < 1:
        return (1,)
    preferred = config.get("dynamic_batching", {}).get("preferred_batch_size", [])
    if "dynamic_batching" not in config:
        return (1, largest)
    return batch_sizes(largest, tuple(map(int, preferred)))
