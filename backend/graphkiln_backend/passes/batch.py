"""Makes the batch vary that a graph was saved with.

Which axis carries the batch is followed from the inputs through every node, by the static shapes. Along an axis there
can be more: a window attention folds its windows into the batch, `[batch * 64, 49, 96]`. What the graph has baked in on
the way is repaired: the shapes of reshapes, the sizes of expansions, and constants that were expanded to the batch. A
node that would mix samples is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH
from graphkiln_backend.passes.batch_axis import RULES, BatchAxis, ExpandedToBatch, Follower, Value, name_batch
from graphkiln_backend.passes.edge import Edge

_MOST_TRIES = 500  # of following the batch through a graph


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
        follower = _followed(model, saved_batch(model))
        follower.repair()
        for value, axis in follower.axes.items():
            name_batch(value, axis)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:
        """See `Pass.ensures`."""
        fixed = [str(value.name) for value in model.graph.outputs if _first_dim(value) != BATCH]
        return f"the batch is not the first dimension of {', '.join(fixed)}" if fixed else ""


def _followed(model: onnx_ir.Model, batch: int) -> Follower:
    """Follows the batch to the end.

    Raises:
        ConversionError: No choice among the places of a batch of 1 leads there; the reason is that of the first.
    """
    expanded, choices = dict[Value, BatchAxis](), dict[onnx_ir.Node, int]()
    first: ConversionError | None = None
    for _ in range(_MOST_TRIES):
        follower = Follower(model, batch, expanded, choices)
        try:
            _follow(follower)
        except ExpandedToBatch as found:  # once for each Expand at most
            expanded[found.value] = found.axis
        except ConversionError as error:
            first = first or error
            if not _choose_otherwise(choices, follower.open_choices):
                raise first from error
        else:
            return follower
    raise first or ConversionError(f"the saved batch of {batch} cannot be followed through the graph")


def _choose_otherwise(choices: dict[onnx_ir.Node, int], open_choices: Mapping[onnx_ir.Node, int]) -> bool:
    """Takes the next choice of the last node that has one left; those after it begin again."""
    for node, count in reversed(list(open_choices.items())):
        if choices.get(node, 0) + 1 < count:
            choices[node] = choices.get(node, 0) + 1
            return True
        choices.pop(node, None)
    return False


def _follow(follower: Follower) -> None:
    for node in follower.model.graph:
        if node.outputs[0] in follower.expanded:
            axis = follower.expand_here(node)
        elif not follower.reaches(node):
            continue
        elif (rule := RULES.get(node.op_type)) is None or node.domain not in ("", "ai.onnx"):
            raise follower.error(node, "how it treats a batch is not known")
        else:
            found = rule(follower, node)
            axis, *others = (found,) if isinstance(found, BatchAxis) else found
            follower.axes.update(zip(node.outputs[1:], others, strict=False))
        for value in node.outputs:
            follower.axes.setdefault(value, axis)


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
