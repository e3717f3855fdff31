"""`graphkiln lower`: fill the artifact cache ahead of time, so that the server's start builds nothing."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from graphkiln.cli.console import print_json, say
from graphkiln.cli.deployed import ModelPath, Set, open_artifact_cache, read_deployment
from graphkiln.cli.lowering_report import session_document
from graphkiln.cli.node_timing import measure_model
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, ComputeLimit
from graphkiln.cli.remote_paths import local_path
from graphkiln_backend.engines.compute_limit import limit_computing


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
            for line in (*proven.fallbacks, *proven.notes):
                say(line)
            typer.echo(f"{proven.config}: {proven.placement}")
            if proven.self_test:
                typer.echo(proven.self_test.verdict)
            typer.echo(f"ready in {seconds:.1f} s")
