"""Dead-output pruning: a graph that computes some of its outputs only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.graph_file import save


@dataclass(frozen=True)
class PruneOutputs:
    """Drop outputs, and the nodes that only they need.

    Attributes:
        outputs: Names of those to keep.
    """

    outputs: tuple[str, ...]
    name: str = "prune-outputs"
    summary: str = "outputs that are not requested, and what only they need"

    def requires(self, model: onnx_ir.Model) -> str:
        """An output that is not kept.

        Raises:
            ConversionError: An output to keep does not exist.
        """
        known = [str(value.name) for value in model.graph.outputs]
        for name in self.outputs:
            if name not in known:
                raise ConversionError(f"the graph has no output '{name}'", hint=did_you_mean(name, known))
        return "" if len(self.outputs) < len(known) else "all outputs are kept"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Inputs stay, also those that no output needs any more."""
        kept = [value for value in model.graph.outputs if value.name in self.outputs]
        model.graph.outputs.clear()
        model.graph.outputs.extend(kept)
        names = frozenset(str(value.name) for value in kept)
        return Edge(
            to_graph_outputs=lambda outputs: {name: array for name, array in outputs.items() if name in names},
            kept=names,
        )

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - by construction
        """Nothing."""
        return ""


def keep_outputs(graph_path: Path, outputs: Collection[str], target: Path) -> float:
    """Write a graph that computes only some outputs.

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
    prune = PruneOutputs(tuple(outputs))
    try:
        prune.requires(model)
    except ConversionError as error:
        raise LoweringError(f"cannot cut {graph_path}", attempts=(str(error),)) from error
    before = model.graph.num_nodes()
    prune(model)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    save(model, target)
    return 1 - model.graph.num_nodes() / before
