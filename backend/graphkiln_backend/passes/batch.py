"""Makes the batch vary that a graph was saved with.

Which axis carries the batch is followed from the inputs through every node, by the static shapes. Along an axis there
can be more: a window attention folds its windows into the batch, `[batch * 64, 49, 96]`. What the graph has baked in on
the way is repaired: the shapes of reshapes, the sizes of expansions, and constants that were expanded to the batch. A
node that would mix samples is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH
from graphkiln_backend.passes.batch_following import BatchAxis, ExpandedToBatch, Follower, Value, name_batch
from graphkiln_backend.passes.batch_rules import RULES
from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True, slots=True)
class VaryBatch:
    """Lets the batch vary that a graph was saved with."""

    @property
    def name(self) -> str:
        """See `Pass.name`."""
        return "vary-batch"

    @property
    def summary(self) -> str:
        """See `Pass.summary`."""
        return "lets the batch vary that was saved with the graph"

    def requires(self, model: onnx_ir.Model) -> str:
        """See `Pass.requires`."""
        fixed = [value for value in model.graph.inputs if isinstance(_first_dim(value), int)]
        return "" if fixed else "the batch varies already"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """See `Pass.__call__`.

        Raises:
            ConversionError: The inputs have no common batch, or a node mixes samples.
        """
        batch, expanded = saved_batch(model), dict[Value, BatchAxis]()
        while True:
            follower = Follower(model, batch, expanded)
            try:
                _follow(follower)
                break
            except ExpandedToBatch as found:  # once for each Expand at most
                expanded[found.value] = found.axis
        follower.repair()
        for value, axis in follower.axes.items():
            name_batch(value, axis)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:
        """See `Pass.ensures`."""
        fixed = [str(value.name) for value in model.graph.outputs if _first_dim(value) != BATCH]
        return f"the batch is not the first dimension of {', '.join(fixed)}" if fixed else ""


def _follow(follower: Follower) -> None:
    for node in follower.model.graph:
        if node.outputs[0] in follower.expanded:
            axis = follower.expand_here(node)
        elif not follower.reaches(node):
            continue
        elif (rule := RULES.get(node.op_type)) is None:
            raise follower.error(node, "how it treats a batch is not known")
        else:
            axis = rule(follower, node)
        follower.axes.update(dict.fromkeys(node.outputs, axis))


def _first_dim(value: Value) -> object:
    shape = value.shape
    if shape is None or not len(shape):
        return None
    return shape[0] if isinstance(shape[0], int) else shape[0].value


def saved_batch(model: onnx_ir.Model) -> int:
    """The batch size that a graph was saved with: the first dimension of all inputs.

    Raises:
        ConversionError: It varies, or the inputs do not share it.
    """
    sizes = {_first_dim(value) for value in model.graph.inputs}
    (size,) = sizes if len(sizes) == 1 else (None,)
    if not isinstance(size, int):
        listed = ", ".join(f"{value.name} {list(value.shape or ())}" for value in model.graph.inputs)
        raise ConversionError(
            f"the inputs have no common first dimension that could be the batch: {listed}",
            hint="save the graph with the batch first in every input",
        )
    return size
