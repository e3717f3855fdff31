"""What `lower --measure` does first: how long each node of a graph takes, into a file beside the graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.cli.deployed import read_deployment

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache

_WHOLE = "parallel="
"""What is measured does not depend on how the model is spread, nor on what was measured before."""


def measure_model(path: str, folder: Path, artifacts: ArtifactCache) -> str:
    """Measures the nodes of a model, and writes `node_times.json` beside its graph; what was done, in a line.

    Args:
        path: As the user wrote it.
        folder: Where it lies on this machine.
        artifacts: Keeps what is converted from the graphs of other frameworks.

    Raises:
        LoweringError: The graph computes no request that is known, or lies where nothing can be kept beside it.
        GraphkilnError: The version or its configuration is not usable.
    """
    from graphkiln_backend.graph.errors import LoweringError
    from graphkiln_backend.lowering.parallel.timing import keep_times, measure_nodes

    deployment = read_deployment(folder, [_WHOLE], artifacts)
    version = deployment.version
    if not version.graph_path.is_relative_to(folder.absolute()) or Path(path).absolute() != folder.absolute():
        raise LoweringError(
            "times of nodes are kept beside the graph",
            attempts=(f"{path} has no graph of its own on this machine that they could be kept with",),
            hint="convert it into a model store of this machine (graphkiln convert), or pull it (graphkiln pull)",
        )
    times = measure_nodes(
        version, largest_batch=max(deployment.warmup_batch_sizes), op_libraries=deployment.settings.op_libraries
    )
    kept = keep_times(version, times)
    sizes = " and ".join(map(str, times.sizes))
    return f"measured {len(times.at(times.sizes[0]))} nodes for batches of {sizes}: {kept}"
