"""From a version folder and its configuration to a session: the path that the server and the commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import LoweringPlan, Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.lowering.settings import Override, Settings
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import ModelVersion, read_version
from graphkiln_backend.system.resources import usable_cores


def find_libraries(names: Sequence[str], model: Path) -> tuple[str, ...]:
    """Find libraries of custom operators, as the system's loader takes them.

    A relative path starts at the server's working directory, as in Triton's C++ backend, or else at the model's folder;
    a bare name that is in neither is left to the loader, which looks in LD_LIBRARY_PATH.

    Args:
        names: `model_operations.op_library_filename` of the configuration.
        model: The model's folder.

    Raises:
        RepositoryError: There is no such file.
    """
    return tuple(_find(name, model) for name in names)


def _find(name: str, model: Path) -> str:
    places = [Path(name).absolute(), model.absolute() / name]  # an absolute one stays as it is
    for place in places:
        if place.is_file():
            return str(place)
    if "/" not in name and name:
        return name
    looked = " and ".join(dict.fromkeys(map(str, places)))
    raise RepositoryError(
        f"op_library_filename names the library '{name}', which is missing",
        hint=f"looked for {looked}: write an absolute path, or put the library into the model's folder",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A version, its settings, and the plan that follows from both.

    Attributes:
        version: The version.
        settings: Settings of its configuration and the command line.
        plan: The sessions to try.
        saved: Precision that the graph was saved in.
        warmup_batch_sizes: The batch sizes to run before the first request comes.
        places: With `parallel`: places of the instance.
    """

    version: ModelVersion
    settings: Settings
    plan: LoweringPlan
    saved: Precision
    warmup_batch_sizes: tuple[int, ...]
    places: tuple[Place, ...] = ()

    @classmethod
    def read(
        cls, folder: Path, config: ModelConfig, resources: Resources, overrides: Sequence[Override] = ()
    ) -> Deployment:
        """Read a version and plan it.

        Args:
            folder: The folder that holds the version's graph.
            config: The model's configuration, completed from the graph.
            resources: Cores and devices; `instances` is replaced by the configuration's.
            overrides: Values of the command line.

        Raises:
            GraphkilnError: The version or its configuration is not usable, or nothing can run it as requested.
        """
        settings = Settings.from_config(config, resources.device, overrides)
        libraries = find_libraries(config.op_libraries, folder.parent)
        settings = replace(settings, op_libraries=libraries)
        version = read_version(folder, config.default_model_filename)
        _check_responses(config)
        _check_batching(version, config)
        saved = saved_precision(version)
        sizes = config.warmup_batch_sizes
        resources = replace(resources, instances=config.processes)
        spread = None
        if settings.parallel:
            from graphkiln_backend.lowering.parallel.spreading import spread_model  # which few models need

            spread = spread_model(
                settings.parallel, settings, version, resources, saved=saved, largest_batch=max(sizes)
            )
            spread.check_apart(config.gpus)
            settings, resources = spread.apply(settings, resources)
        planned = plan(settings, resources, saved=saved, largest_batch=max(sizes))
        return cls(
            version=version,
            settings=settings,
            plan=replace(planned, spread=spread.explain()) if spread else planned,
            saved=saved,
            warmup_batch_sizes=sizes,
            places=resources.places,
        )

    @classmethod
    def here(
        cls,
        version: Path,
        config: ModelConfig,
        cache: ArtifactCache,
        overrides: Sequence[Override] = (),
        *,
        cores: int | None = None,
        works_beside: bool = False,
    ) -> Deployment:
        """Read a version of a store and plan it for this machine.

        Args:
            version: The version folder; a graph of another framework is converted.
            config: The model's configuration, completed from the graph.
            cache: Keeps conversions.
            overrides: Values of the command line.
            cores: Number of cores; all of them by default.
            works_beside: Whether the process computes something else on its cores, too.

        Raises:
            GraphkilnError: The version or its configuration is not usable, or nothing can run it as requested.
        """
        resources = Resources(
            device=config.device, cores=cores or usable_cores(), probe=probe, works_beside=works_beside
        )
        return cls.read(convert_if_needed(version, cache), config, resources, overrides)

    def build(self, cache: ArtifactCache) -> ProvenSession:
        """Build, prove and warm up the session that will serve.

        Args:
            cache: Keeps artifacts.

        Raises:
            LoweringError: No session of the plan works.
        """
        artifacts = Artifacts(self.version, self.saved, cache)
        requirements = Requirements(batch_sizes=self.warmup_batch_sizes, self_test=self.settings.self_test)
        return select_session(artifacts, self.plan, requirements)


def _check_responses(config: ModelConfig) -> None:
    """Refuse decoupled models: Triton would answer each request with an error, as a graph gives one response.

    Raises:
        RepositoryError: The configuration promises any number of them.
    """
    if config.decoupled:
        raise RepositoryError(
            "model_transaction_policy is decoupled, but a graph gives one response to each request",
            hint="take `decoupled: true` out of config.pbtxt",
        )


def _check_batching(version: ModelVersion, config: ModelConfig) -> None:
    """Refuse batches of a graph that was proven whole: its rows are unknown, or not independent.

    Raises:
        RepositoryError: The configuration requests them.
    """
    if config.max_batch_size > 0 and version.golden and version.golden.whole:
        raise RepositoryError(
            f"max_batch_size is {config.max_batch_size}, but the graph was proven whole, without batches",
            hint="set max_batch_size: 0 and write dims with all dimensions, as graphkiln convert did",
        )
