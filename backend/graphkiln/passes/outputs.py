"""Dead-output pruning: a graph that computes some of its outputs only."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from graphkiln.graph.errors import LoweringError

_EXTERNAL_DATA_FROM_BYTES = 2**30
"""A protobuf message ends at 2 GiB: larger weights go into a file of their own."""


def keep_outputs(graph_path: Path, outputs: Collection[str], target: Path) -> float:
    """Writes a graph that computes only some outputs. Inputs stay, also those that no output needs any more.

    Args:
        graph_path: The graph.
        outputs: Names of outputs that it has.
        target: Where to write; its folder must be empty of other graphs, weights may be put beside it.

    Returns:
        The share of the nodes that were dropped.

    Raises:
        LoweringError: The graph cannot be read, or has no such output.
    """
    try:
        model = onnx_ir.load(graph_path)
    except Exception as error:
        raise LoweringError(f"cannot read {graph_path}", attempts=(str(error),)) from error
    kept = [value for value in model.graph.outputs if value.name in outputs]
    missing = set(outputs) - {value.name for value in kept}
    if missing:
        raise LoweringError(f"{graph_path} has no output {', '.join(sorted(missing))}", attempts=())
    before = model.graph.num_nodes()
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    _save(model, target)
    return 1 - model.graph.num_nodes() / before


def _save(model: onnx_ir.Model, target: Path) -> None:
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    onnx_ir.external_data.load_to_model(model)  # else the copy would look for its weights where the graph has them
    external = f"{target.name}.data" if size > _EXTERNAL_DATA_FROM_BYTES else None
    onnx_ir.save(model, target, external_data=external)
