"""`graphkiln lower`: fill the artifact cache ahead of time, so that the server's start builds nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import print_json, say
from graphkiln.cli.lowering_report import open_artifact_cache, read_deployment, session_document
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, ComputeLimit, ModelPath, Set, local_path
from graphkiln_backend.engines.compute_limit import limit_computing

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache


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

    deployment = read_deployment(folder, ["parallel="], artifacts)  # measured whole, however it is spread
    version = deployment.version
    if not version.graph_path.is_relative_to(folder.absolute()) or Path(path).absolute() != folder.absolute():
        raise LoweringError(
            "times of nodes are kept beside the graph",
            attempts=(f"{path} is not a model on this machine whose graph they could be kept with",),
            hint="convert it into a model store of this machine (graphkiln convert), or pull it (graphkiln pull)",
        )
    times = measure_nodes(
        version, largest_batch=max(deployment.warmup_batch_sizes), op_libraries=deployment.settings.op_libraries
    )
    kept = keep_times(version, times)
    sizes = " and ".join(map(str, times.sizes))
    return f"measured {len(times.at(times.sizes[0]))} nodes for batches of {sizes}: {kept}"
