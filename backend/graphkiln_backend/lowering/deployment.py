"""From a version folder and its configuration to the session that serves: read, plan, measure, choose.

The server and the commands share this path. Of several candidates the fastest serves. The measurement is kept in the
artifact cache if every candidate was built and timed, so that all instances of a model choose alike, and later starts
build only the chosen candidate. A lower precision requested with `engine: auto` is measured beside fp32, which serves
unless the lower precision is faster, or the graph cannot be timed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.engines.timing import fastest_runs_s, pick_fastest
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.errors import (
    ExecutionError,
    GraphkilnError,
    LoweringError,
    RepositoryError,
    SignatureError,
)
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, Measurement, saved_precision
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import LoweringPlan, Resources, plan
from graphkiln_backend.lowering.proven_session import Basis, ProvenSession, build_proven_session
from graphkiln_backend.lowering.settings import Override, Settings
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.lowering.warmup import feeds_of
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import GraphFormat, ModelVersion, read_version
from graphkiln_backend.system.resources import usable_cores

_log = logging.getLogger("graphkiln.lowering")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A version, its settings, and the resulting plan.

    Attributes:
        version: The version.
        settings: Settings of the configuration and the command line.
        plan: Sessions to try.
        saved: Precision of the saved graph.
        warmup_batch_sizes: Batch sizes to run before the first request.
        places: Cores or GPUs of the instance's stages and shards, if `parallel` is set.
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
        """Read a version and plan its sessions.

        Args:
            folder: Folder of the version's graph.
            config: The model's configuration, completed from the graph.
            resources: Cores and devices; `instances` is taken from the configuration.
            overrides: Settings of the command line.

        Raises:
            GraphkilnError: The version or its configuration is invalid, or no engine can run it as requested.
        """
        settings = Settings.from_config(config, resources.device, overrides)
        libraries = tuple(find_library(name, folder.parent) for name in config.op_libraries)
        settings = replace(settings, op_libraries=libraries)
        version = read_version(folder, config.default_model_filename)
        if config.decoupled:
            raise RepositoryError(
                "model_transaction_policy is decoupled, but a graph gives one response to each request",
                hint="take `decoupled: true` out of config.pbtxt",
            )
        if config.max_batch_size > 0 and version.golden and version.golden.whole:
            raise RepositoryError(
                f"max_batch_size is {config.max_batch_size}, but the graph was verified without batching",
                hint="set max_batch_size: 0 and write dims with all dimensions, as graphkiln convert did",
            )
        saved = saved_precision(version)
        sizes = config.warmup_batch_sizes
        resources = replace(resources, instances=config.processes)
        spread = None
        if settings.parallel and version.format is not GraphFormat.ONNX:
            raise LoweringError(
                f"parallel: {settings.parallel}",
                attempts=(f"the graph is in {version.format}, and only ONNX graphs are spread over devices",),
                hint="leave `parallel` out, or serve the ONNX file that the graph was made from",
            )
        if settings.parallel:
            from graphkiln_backend.lowering.parallel.spreading import spread_model  # few models need it

            spread = spread_model(
                settings.parallel, settings, version, resources, saved=saved, largest_batch=max(sizes)
            )
            spread.check_apart(config.gpus)
            settings, resources = spread.apply(settings, resources)
        planned = plan(settings, resources, saved=saved, largest_batch=max(sizes), graph_format=version.format)
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
        """Read a version of a model store and plan it for this machine.

        Args:
            version: The version folder; a graph saved by another framework is converted.
            config: The model's configuration, completed from the graph.
            cache: Cache for conversions.
            overrides: Settings of the command line.
            cores: Number of cores, or None for all.
            works_beside: Whether other work runs on the same cores.

        Raises:
            GraphkilnError: The version or its configuration is invalid, or no engine can run it as requested.
        """
        resources = Resources(
            device=config.device, cores=cores or usable_cores(), probe=probe, works_beside=works_beside
        )
        return cls.read(convert_if_needed(version, cache), config, resources, overrides)

    def build(self, cache: ArtifactCache) -> ProvenSession:
        """Build, verify and warm up the session that will serve.

        Raises:
            LoweringError: No session of the plan works.
        """
        artifacts = Artifacts(self.version, self.saved, cache)
        requirements = Requirements(batch_sizes=self.warmup_batch_sizes, self_test=self.settings.self_test)
        return select_session(artifacts, self.plan, requirements)


def find_library(name: str, model: Path) -> str:
    """Resolve a library of custom operators for the dynamic loader.

    A relative path is resolved against the server's working directory, as in Triton's C++ backend, then against the
    model's folder. A bare name found in neither is left to the loader, which searches LD_LIBRARY_PATH.

    Args:
        name: Entry of `model_operations.op_library_filename`.
        model: The model's folder.

    Raises:
        RepositoryError: The file does not exist.
    """
    places = [Path(name).absolute(), model.absolute() / name]
    for place in places:
        if place.is_file():
            return str(place)
    if "/" not in name and name:
        return name
    searched = " and ".join(dict.fromkeys(map(str, places)))
    raise RepositoryError(
        f"op_library_filename names the library '{name}', which is missing",
        hint=f"searched {searched}: write an absolute path, or put the library into the model's folder",
    )


def select_session(artifacts: Artifacts, plan: LoweringPlan, requirements: Requirements) -> ProvenSession:
    """Build, verify and warm up the fastest candidate that works, or else the first fallback that does.

    Raises:
        LoweringError: All configurations failed; `attempts` has the reason of each.
    """
    builder = _Builder(artifacts, requirements)
    if len(plan.candidates) + len(plan.baselines) > 1:
        selected = _build_fastest(builder, plan)
    else:
        selected = builder.build_first(plan.candidates)
    selected = selected or builder.build_first(plan.fallback)
    if selected is None:
        raise LoweringError(f"cannot serve {artifacts.version.graph_path}", attempts=tuple(builder.failures))
    return replace(selected, failures=tuple(builder.failures))


class _Builder:
    """Builds sessions and collects the errors of those that fail."""

    def __init__(self, artifacts: Artifacts, requirements: Requirements) -> None:
        self.artifacts = artifacts
        self.requirements = requirements
        self.failures: list[str] = []

    def build(self, config: SessionConfig) -> ProvenSession | None:
        try:
            return build_proven_session(self.artifacts, config, self.requirements)
        except GraphkilnError as error:
            self.failures.append(f"{config}: {error}")
            return None

    def build_first(self, configs: Iterable[SessionConfig]) -> ProvenSession | None:
        return next((built for config in configs if (built := self.build(config))), None)


def _build_fastest(builder: _Builder, plan: LoweringPlan) -> ProvenSession | None:
    """Build the configuration that is fastest on the largest batch, by a cached or new measurement."""
    # Baselines first: they win ties, since a lower precision must be faster.
    configs = (*plan.baselines, *plan.candidates)
    artifacts, requirements = builder.artifacts, builder.requirements
    manifest = artifacts.version.manifest
    conditions = {
        "batch": str(requirements.largest_batch),
        "self-test": str(requirements.self_test),
        "golden samples": manifest.golden.sha256 if manifest and manifest.golden else "none",
    }
    with _closed_unless_taken() as built:
        # The lock is held during the measurement: one instance measures, the others reuse its result.
        with artifacts.recall_choice(configs, conditions) as fact:
            measurement = fact.value or _measure(builder, plan, configs, built)
            if measurement is None:
                return None
            basis = Basis(
                chosen=measurement.chosen,
                rates=measurement.rates,
                batch=requirements.largest_batch,
                machine=hardware.identity(configs[0].device),
                measured_at=fact.found_at.isoformat(timespec="seconds"),
                remembered=fact.value is not None,
            )
            if len(measurement.rates) == len(configs):  # otherwise the next start retries the failed candidate
                fact.keep(measurement)
        chosen = built.pop(basis.chosen, None)
    if chosen is None:
        # A cached choice, which is not built yet. If it no longer works, the others are tried.
        chosen = builder.build_first(sorted(configs, key=lambda config: str(config) != basis.chosen))
    return chosen and explain_choice(chosen, basis, plan)


def _measure(
    builder: _Builder, plan: LoweringPlan, configs: Sequence[SessionConfig], built: dict[str, ProvenSession]
) -> Measurement | None:
    """Build all configurations into `built` by name and compare their speed; return None if none can be built."""
    batch = builder.requirements.largest_batch
    _log.info("measuring %s at batch %d", ", ".join(map(str, configs)), batch)
    for config in configs:
        if session := builder.build(config):
            built[str(config)] = session
    if not built:
        return None
    synthetic = {proven.synthetic for proven in built.values()}
    samples = builder.artifacts.version.golden or (synthetic.pop() if len(synthetic) == 1 else None)
    measurement = measure({name: proven.session for name, proven in built.items()}, samples, batch)
    if measurement.rates:
        return measurement
    # The graph cannot be timed: serve the requested configuration.
    return replace(measurement, chosen=next((str(c) for c in plan.candidates if str(c) in built), measurement.chosen))


def measure(sessions: Mapping[str, Session], samples: GoldenSamples | SyntheticInputs | None, size: int) -> Measurement:
    """Compare the speed of sessions; choose the first one if the graph cannot be run.

    Args:
        sessions: At least one session, by name.
        samples: Golden samples, synthetic inputs, or None if neither is known.
        size: Batch size.
    """
    if samples is None:
        return Measurement(chosen=next(iter(sessions)), rates={})
    try:
        times = fastest_runs_s(
            {
                name: partial(session.run, feeds_of(samples, session.signature, size))
                for name, session in sessions.items()
            }
        )
    except (ExecutionError, SignatureError):
        return Measurement(chosen=next(iter(sessions)), rates={})
    chosen = list(times)[pick_fastest(list(times.values()))]
    return Measurement(chosen=chosen, rates={name: float(f"{size / seconds:.4g}") for name, seconds in times.items()})


@contextmanager
def _closed_unless_taken() -> Iterator[dict[str, ProvenSession]]:
    """Yield a dict of sessions; close those that remain in it at the end of the block."""
    built: dict[str, ProvenSession] = {}
    try:
        yield built
    finally:
        for proven in built.values():
            proven.session.close()


def explain_choice(chosen: ProvenSession, basis: Basis, plan: LoweringPlan) -> ProvenSession:
    """Add the reason of the choice to the chosen session, and a line for each configuration that was not chosen."""
    name = str(chosen.config)
    basis = replace(basis, chosen=name)
    rate = basis.rates.get(name)
    if rate is None:
        return replace(chosen, basis=basis)
    gains = _gains(basis, plan)
    fastest = f"the fastest here, {rate}/s at batch {basis.batch}"
    reason = "; ".join(filter(None, (chosen.config.reason, fastest, gains.get(name))))
    taken = name in map(str, plan.candidates)
    slower = []
    for other in basis.rates:
        if other != name:
            gain = gains.get(other, "")
            refusal = (gain if taken else f"{gain}: not taken") if gain else "not clearly faster"
            slower.append(f"{other}: {refusal}, {basis.rates[other]}/s at batch {basis.batch} beside {rate}/s")
    if gains and name not in gains:
        _log.warning("%s", next(line for line in slower if line.partition(":")[0] in gains))
    return replace(chosen, config=replace(chosen.config, reason=reason), slower=tuple(slower), basis=basis)


def _gains(basis: Basis, plan: LoweringPlan) -> dict[str, str]:
    """Describe the speed of each candidate relative to the fastest fp32 baseline, by name."""
    fp32 = max((basis.rates.get(str(config), 0.0) for config in plan.baselines), default=0.0)
    gains = {}
    for config in plan.candidates if fp32 else ():
        if rate := basis.rates.get(str(config)):
            ratio = rate / fp32
            # A third digit if two would print 1.0.
            text = f"{ratio:.2g}" if abs(ratio - 1) > 0.05 else f"{ratio:.3g}"
            gains[str(config)] = f"{config.precision} was measured {text}x of {Precision.FP32} on this machine"
    return gains
