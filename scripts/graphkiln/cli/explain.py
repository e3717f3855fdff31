"""`graphkiln explain`: how a model is lowered, with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import print_json, print_table
from graphkiln.cli.lowering_report import (
    images_in_words,
    open_artifact_cache,
    plan_document,
    read_deployment,
    session_document,
    settings_in_words,
)
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, ComputeLimit, ModelPath, Set, local_path
from graphkiln_backend.engines.compute_limit import limit_computing

if TYPE_CHECKING:
    from graphkiln_backend.lowering.proven_session import ProvenSession


def explain(
    path: ModelPath,
    set_: Set = None,
    cache: Cache = "",
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Show the plan without building.")] = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Explain how a model is lowered on this machine.

    Shows each setting with its origin, each choice, the actual placement, and the image model if there is one.
    """
    with local_path(path) as folder, limit_computing(compute_limit), open_artifact_cache(cache) as artifacts:
        deployment = read_deployment(folder, set_, artifacts)
        images = images_in_words(folder, artifacts)
        manifest = deployment.version.manifest
        notes = manifest.conversion.notes if manifest and manifest.conversion else ()
        if as_json:
            document = plan_document(deployment.settings, deployment.saved, deployment.plan) | {
                "conversion": list(notes)
            }
            if not plan_only:
                proven = deployment.build(artifacts)
                with proven.session:
                    document["session"] = session_document(proven)
            print_json(document | ({"images": images} if images else {}))
            return
        origins = deployment.settings.origins
        settings = settings_in_words(deployment.settings, deployment.saved)
        rows = [(name, value, origins.get(name, "-")) for name, value in settings.items()]
        print_table(("setting", "value", "requested by"), rows)
        typer.echo(deployment.plan.explain())
        if images:
            typer.echo(f"images: {images}")
        for note in notes:
            typer.echo(f"conversion: {note}")
        if not plan_only:
            proven = deployment.build(artifacts)
            with proven.session:
                _show_result(proven)


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
