"""`graphkiln explain` and `lower`: lower a model on this machine as the server would, and describe the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json, print_table, say
from graphkiln.cli.options import (
    COMPUTE_LIMIT_S,
    AsJson,
    BackendDirectory,
    Cache,
    ComputeLimit,
    ModelPath,
    Set,
    local_path,
    version_folder,
)
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.decoding import encode

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache
    from graphkiln_backend.engines.base import SessionConfig
    from graphkiln_backend.graph.precision import Precision
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.plan import LoweringPlan
    from graphkiln_backend.lowering.proven_session import ProvenSession
    from graphkiln_backend.lowering.seat import Seat
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.config import ModelConfigProto
    from graphkiln_backend.repository.version import ModelVersion


def explain(
    path: ModelPath,
    set_: Set = None,
    cache: Cache = "",
    backend_directory: BackendDirectory = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Show the plan without building.")] = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Explain how a model is lowered on this machine.

    Shows each setting with its origin, each choice, who computes and why, the actual placement, and the image model if
    there is one.
    """
    with local_path(path) as folder, limit_computing(compute_limit), open_artifact_cache(cache) as artifacts:
        deployment = read_deployment(folder, set_, artifacts, backend_directory)
        seat = find_seat(folder, set_, artifacts, backend_directory)
        images = describe_image_model(folder, artifacts)
        manifest = deployment.version.manifest
        notes = manifest.conversion.notes if manifest and manifest.conversion else ()
        if as_json:
            document = plan_document(deployment.settings, deployment.saved, deployment.plan) | {
                "seat": encode(seat),
                "conversion": list(notes),
            }
            if not plan_only:
                proven = deployment.build(artifacts)
                with proven.session:
                    document["session"] = session_document(proven)
            print_json(document | ({"images": images} if images else {}))
            return
        origins = deployment.settings.origins
        settings = format_settings(deployment.settings, deployment.saved)
        rows = [(name, value, origins.get(name, "-")) for name, value in settings.items()]
        print_table(("setting", "value", "requested by"), rows)
        typer.echo(deployment.plan.explain())
        typer.echo(f"seat: {seat}")
        if images:
            typer.echo(f"images: {images}")
        for note in notes:
            typer.echo(f"conversion: {note}")
        if not plan_only:
            proven = deployment.build(artifacts)
            with proven.session:
                _show_result(proven)
            if seat.native and proven.config.tuning != deployment.settings.tuning:  # the rewrites are off
                instead = "they are off there, too" if seat.requested else "graphkiln computes the version"
                typer.echo(f"note: if ONNX Runtime's rewrites fail the proof in the native seat, {instead}")


def _show_result(proven: ProvenSession) -> None:
    for line in (*proven.failures, *proven.slower):
        typer.echo(f"rejected: {line}")
    typer.echo(f"serves: {proven.config}")
    if proven.basis:
        typer.echo(f"because: {proven.config.reason}")
    typer.echo(f"ran: {proven.placement or 'unknown: no golden samples, and the graph does not run on zeros'}")
    typer.echo(f"self-test: {proven.self_test.verdict if proven.self_test else 'none'}")
    for note in proven.notes:
        typer.echo(f"note: {note}")


def lower(
    path: ModelPath,
    set_: Set = None,
    cache: Cache = "",
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="First measure each node on one core: `parallel` balances stages by node_times.json."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Lower a model as the server will, into the artifact cache.

    The session is proven as it is before serving.
    """
    begun = time.monotonic()
    with (
        local_path(path) as folder,
        limit_computing(compute_limit),
        open_artifact_cache(cache, must_keep=True) as artifacts,
    ):
        if measure:
            say(measure_model(path, folder, artifacts))
        proven = read_deployment(folder, set_, artifacts).build(artifacts)
        with proven.session:
            seconds = time.monotonic() - begun
            if as_json:
                print_json({**session_document(proven), "seconds": round(seconds, 2)})
                return
            for line in (*proven.failures, *proven.notes):
                say(line)
            typer.echo(f"{proven.config}: {proven.placement}")
            if proven.self_test:
                typer.echo(proven.self_test.verdict)
            typer.echo(f"ready in {seconds:.1f} s")


def measure_model(path: str, folder: Path, artifacts: ArtifactCache) -> str:
    """Measure the nodes of a model, and write `node_times.json` beside its graph; return a summary line.

    Raises:
        LoweringError: The graph computes no known request, or its folder cannot keep files.
        GraphkilnError: The version or its configuration is not usable.
    """
    from graphkiln_backend.graph.errors import LoweringError
    from graphkiln_backend.lowering.parallel.speed import keep_times, measure_nodes

    deployment = read_deployment(folder, ["parallel="], artifacts)  # the whole graph, also if it is spread
    version = deployment.version
    if not version.graph_path.is_relative_to(folder.absolute()) or Path(path).absolute() != folder.absolute():
        raise LoweringError(
            "times of nodes are stored beside the graph",
            attempts=(f"{path} is not the folder of a graph on this machine",),
            hint="convert it into a model store of this machine (graphkiln convert), or pull it (graphkiln pull)",
        )
    times = measure_nodes(
        version, largest_batch=max(deployment.warmup_batch_sizes), op_libraries=deployment.settings.op_libraries
    )
    kept = keep_times(version, times)
    sizes = " and ".join(map(str, times.sizes))
    return f"measured {len(times.at(times.sizes[0]))} nodes for batches of {sizes}: {kept}"


# A model of a store, lowered as the server does, and the JSON documents.


@contextmanager
def open_artifact_cache(cache: str, *, must_keep: bool = False) -> Iterator[ArtifactCache]:
    """Open the artifact cache of `--cache`, or a temporary one; only the server evicts entries.

    Raises:
        CacheError: The folder is unusable, and `must_keep` is true.
    """
    from graphkiln.cli.cache import cache_settings
    from graphkiln_backend.system.owned_folder import OwnedFolder

    settings = cache_settings(cache, sys.maxsize)
    if must_keep and settings.folder:
        with settings.open_to_fill() as artifacts:
            yield artifacts
        return
    with OwnedFolder(prefix="graphkiln-cache-") as temporary, settings.checked().open(temporary.path) as artifacts:
        yield artifacts


def read_deployment(
    path: Path, settings: list[str] | None, artifacts: ArtifactCache, backends: Path | None = None
) -> Deployment:
    """Read and plan a version as the server would, with the user's backend directory `backends`.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or nothing can run it as requested.
    """
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.settings import parse_override
    from graphkiln_backend.repository.model_config import ModelConfig

    folder = version_folder(path).absolute()
    config = ModelConfig.from_protobuf(complete_version_config(folder, artifacts, backends), has_gpu=bool(gpus()))
    return Deployment.here(folder, config, artifacts, [parse_override(text) for text in settings or []])


def replay_as_served(version: ModelVersion) -> None:
    """Replay the golden samples of a version on the session that a server of this machine would build.

    Its files need not be complete. A version of another backend is left to that backend, and one that no engine of this
    machine serves as configured to the server's own proof, with a warning.

    Raises:
        LoweringError: No session of the plan works.
        RepositoryError: The configuration is not valid.
    """
    from graphkiln_backend.engines.registry import probe
    from graphkiln_backend.repository.overlay import OtherBackend

    with open_artifact_cache("off") as artifacts:
        try:
            deployment = read_deployment(version.graph_path.parent, None, artifacts)
        except OtherBackend:
            return
        found = [probe(config.engine, config.device) for config in deployment.plan.configs]
        if not any(support.ok for support in found):
            reasons = "; ".join(dict.fromkeys(support.reason for support in found))
            say(f"the samples are not replayed as they would be served, the server proves them: {reasons}")
            return
        proven = replace(deployment, version=version).build(artifacts)
        proven.session.close()
    for line in (*proven.failures, *proven.notes):
        say(line)


def find_seat(path: Path, settings: list[str] | None, artifacts: ArtifactCache, backends: Path | None) -> Seat:
    """Choose who computes a version as the server would, see `read_deployment`.

    Raises:
        RepositoryError: `seat: native` is requested, and only graphkiln can serve the version.
    """
    from graphkiln_backend.lowering.seat import choose_seat, find_native_backend
    from graphkiln_backend.lowering.settings import parse_override
    from graphkiln_backend.server.run_folder import backend_folders

    folder = version_folder(path).absolute()
    overrides = [parse_override(text) for text in settings or []]
    config = complete_version_config(folder, artifacts, backends)
    return choose_seat(config, [folder], overrides, find_native_backend(backend_folders(backends)))


def describe_image_model(path: Path, artifacts: ArtifactCache) -> str:
    """Describe how a model takes encoded images on this machine, or why not; "" if not configured.

    Raises:
        GraphkilnError: The version or its configuration is not usable.
    """
    from graphkiln_backend.server.image_models import asks_for_images, describe_images

    folder = version_folder(path).absolute()
    return describe_images(complete_version_config(folder, artifacts)) if asks_for_images(folder.parent) else ""


def complete_version_config(version: Path, artifacts: ArtifactCache, backends: Path | None = None) -> ModelConfigProto:
    """Complete the configuration of a version's model like the server.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or the model belongs to another backend.
    """
    from graphkiln_backend.lowering.importing import convert_if_needed
    from graphkiln_backend.repository.overlay import complete_config
    from graphkiln_backend.server.run_folder import installed_backend_names

    names = installed_backend_names(backends)
    return complete_config(version.parent, names, partial(convert_if_needed, cache=artifacts))


def format_settings(settings: Settings, saved: Precision) -> dict[str, str]:
    """Format each setting; `saved` is the precision of the saved graph."""
    return {
        "engine": settings.engine or "the default",
        "precision": settings.precision or f"as saved ({saved})",
        "layout": settings.layout or "the engine's",
        "conv_search": settings.conv_search or "the engine's",
        "threads": str(settings.threads or "cores / instances"),
        "streams": str(settings.streams or 1),
        "self_test": "on" if settings.self_test else "off",
        "fallback": ", ".join(map(str, settings.fallback)) or "none",
        "parallel": str(settings.parallel or "one device for each instance"),
        "seat": settings.seat,
        "providers": ", ".join(settings.providers) or "none",
    }


def plan_document(settings: Settings, saved: Precision, plan: LoweringPlan) -> dict[str, Any]:
    """Return settings with their origins, candidates in order, and rejections."""
    rows = format_settings(settings, saved)
    return {
        "settings": {name: {"value": rows[name], "origin": settings.origins.get(name)} for name in rows},
        "candidates": [_config(config) for config in plan.candidates],
        "baselines": [_config(config) for config in plan.baselines],
        "fallback": [_config(config) for config in plan.fallback],
        "rejected": list(plan.rejected),
        "parallel": plan.spread.splitlines(),
    }


def session_document(proven: ProvenSession) -> dict[str, Any]:
    """Return the serving configuration, placement, and proof."""
    placement = None
    if found := proven.placement:
        placement = {
            "nodes": dict(found.nodes),
            "precision": str(found.precision),
            "products": {str(name): count for name, count in found.products.items()},
            "elsewhere": list(found.elsewhere),
        }
    return {
        **_config(proven.config),
        "placement": placement,
        "self_test": encode(proven.self_test) if proven.self_test else None,
        "warmup_s": proven.warmup_s,
        "fallbacks": list(proven.failures),
        "slower": list(proven.slower),
        "choice": encode(proven.basis) if proven.basis else None,
        "notes": list(proven.notes),
    }


def _config(config: SessionConfig) -> dict[str, Any]:
    return {
        "engine": config.engine,
        "providers": list(config.providers),
        "device": str(config.device),
        "precision": str(config.precision) if config.precision else None,
        "threads": config.threads,
        "reason": config.reason,
    }
