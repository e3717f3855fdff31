"""`graphkiln explain`: how a model is lowered, and why not otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json
from graphkiln.cli.lowering_report import (
    ModelPath,
    Set,
    images_in_words,
    open_artifact_cache,
    plan_document,
    read_deployment,
    session_document,
    settings_in_words,
)
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, ComputeLimit, local_path
from graphkiln_backend.engines.compute_limit import limit_computing

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache
    from graphkiln_backend.graph.precision import Precision
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.proven_session import ProvenSession
    from graphkiln_backend.lowering.settings import Settings


def explain(
    path: ModelPath,
    set_: Set = None,
    cache: Cache = "",
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Build nothing; show what would be tried.")] = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Show how a model is lowered on this machine.

    Every setting and its origin, every choice, what really ran, what takes encoded images for it.
    """
    with local_path(path) as folder, limit_computing(compute_limit), open_artifact_cache(cache) as artifacts:
        deployment = read_deployment(folder, set_, artifacts)
        images = images_in_words(folder, artifacts)
        if as_json:
            extra = {"images": images} if images else {}
            print_json({**_document(deployment, artifacts, plan_only=plan_only), **extra})
            return
        _show_settings(deployment.settings, deployment.saved)
        typer.echo(deployment.plan.explain())
        if images:
            typer.echo(f"images: {images}")
        for note in _conversion_notes(deployment):
            typer.echo(f"conversion: {note}")
        if not plan_only:
            proven = deployment.build(artifacts)
            with proven.session:
                _show_result(proven)


def _document(deployment: Deployment, artifacts: ArtifactCache, *, plan_only: bool) -> dict[str, Any]:
    document = plan_document(deployment.settings, deployment.saved, deployment.plan)
    document["conversion"] = list(_conversion_notes(deployment))
    if plan_only:
        return document
    proven = deployment.build(artifacts)
    with proven.session:
        return {**document, "session": session_document(proven)}


def _conversion_notes(deployment: Deployment) -> tuple[str, ...]:
    """Notes of the conversion, such as the speed of int8 beside fp32."""
    manifest = deployment.version.manifest
    return manifest.conversion.notes if manifest and manifest.conversion else ()


def _show_settings(settings: Settings, saved: Precision) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "requested by")
    for name, value in settings_in_words(settings, saved).items():
        table.add_row(name, value, settings.origins.get(name, "-"))
    Console().print(table, highlight=False)


def _show_result(proven: ProvenSession) -> None:
    for line in (*proven.fallbacks, *proven.slower):
        typer.echo(f"rejected: {line}")
    typer.echo(f"serves: {proven.config}")
    if proven.basis:
        typer.echo(f"because: {proven.config.reason}")
    typer.echo(f"ran: {proven.placement or 'not known: the graph has no golden samples and does not run on zeros'}")
    typer.echo(f"self-test: {proven.self_test.verdict if proven.self_test else 'none'}")
    for note in proven.notes:
        typer.echo(f"note: {note}")
