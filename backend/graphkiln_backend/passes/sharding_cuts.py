"""Cuts through the tensors of a graph whose products are sharded.

A tensor is cut along an axis into as many equal parts as there are shards. Where that axis holds several blocks behind
each other, each block is cut: queries, keys and values in one weight, or the heads of each sample of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir

Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut through a tensor.

    Attributes:
        axis: Along which it is cut.
        block: Size of each block along that axis; the whole axis where there is one block.
    """

    axis: int
    block: int

    def indices(self, size: int, shards: int, shard: int) -> Any:
        """What a shard holds along the axis, INT64 `[size / shards]`."""
        blocks = np.arange(size).reshape(-1, shards, self.block // shards)
        return blocks[:, shard].reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """What follows for a node.

    Attributes:
        values: Cuts through the activations that it reads and computes.
        weights: Cuts through its weights, by the number of the input.
        first_only: Weights that the first shard alone has, and zeros elsewhere: a sum would add them for each shard.
        target: The cut through an output whose shape is an input.
        shape_input: The number of that input.
        divided: Weights that hold sizes of the dimension that is cut: of each a shard has its part.
        reduced: Whether its output is a partial sum.
    """

    values: Mapping[Value, Cut] = field(default_factory=dict)
    weights: Mapping[int, Cut] = field(default_factory=dict)
    first_only: frozenset[int] = frozenset()
    target: Cut | None = None
    shape_input: int = 1
    divided: frozenset[int] = frozenset()
    reduced: bool = False


class CannotShard(Exception):
    """A cut cannot be carried on; the text says why."""


def is_weight(value: Value | None) -> bool:
    """Whether a tensor is a weight whose content is known."""
    return value is not None and value.is_initializer() and value.const_value is not None


def holds_weights(value: Value | None) -> bool:
    """Whether a tensor is a weight, or one that is dequantized for whoever reads it."""
    node = value.producer() if value is not None else None
    return is_weight(value) or (node is not None and node.op_type == "DequantizeLinear" and is_weight(node.inputs[0]))


def check_divides(value: Value, cut: Cut, shards: int) -> None:
    """Raises `CannotShard` where a tensor cannot be cut into equal parts."""
    size = dims(value)[cut.axis]
    if cut.block % shards or (isinstance(size, int) and size % cut.block):
        raise CannotShard(f"'{value.name}' has {size} in dimension {cut.axis}, which {shards} shards do not divide")


def dims(value: Value | None) -> list[Any]:
    """The shape of a tensor; raises `CannotShard` where it is not known."""
    if value is None or value.shape is None:
        raise CannotShard(f"the shape of '{value.name if value else 'a tensor'}' is not known")
    return list(value.shape)


def add_weight(model: onnx_ir.Model, name: str, array: Any) -> Value:
    """Gives a graph one more weight.

    Args:
        model: The graph.
        name: That no other has.
        array: Its content.
    """
    tensor = onnx_ir.tensor(np.ascontiguousarray(array), name=name)
    weight = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(weight)
    return weight


Facts = Mapping[Value, Cut]
"""The cuts that are known."""
Rule = Callable[[onnx_ir.Node, Facts, int], Effects]
"""Node, known cuts, number of shards -> what follows; raises `CannotShard`."""


def fact_of(facts: Facts, value: Value | None) -> Cut | None:
    """The cut through a tensor, where it is known."""
    return facts.get(value) if value is not None else None


def cuts_of(node: onnx_ir.Node, facts: Facts) -> list[tuple[Value, Cut]]:
    """The tensors of a node that are known to be cut."""
    return [(value, facts[value]) for value in (*node.inputs, *node.outputs) if value is not None and value in facts]


def only_cut(cuts: Iterable[Cut], node: onnx_ir.Node) -> Cut:
    """The one cut; raises `CannotShard` where there are several."""
    different = set(cuts)
    if len(different) != 1:
        raise CannotShard(f"{node.name} would be cut in {len(different)} ways")
    return different.pop()


def checked(node: onnx_ir.Node, cuts: Mapping[int, Cut], shards: int) -> Mapping[int, Cut]:
    """Cuts through weights, by the number of the input; raises `CannotShard` where one cannot be cut so."""
    for number, cut in cuts.items():
        value = node.inputs[number]
        if value is not None:
            check_divides(value, cut, shards)
    return cuts


def elements(shape: Sequence[Any]) -> int:
    """Of a shape whose sizes are known; raises `CannotShard` where one varies."""
    if not all(isinstance(dim, int) for dim in shape):
        raise CannotShard("a dimension behind the cut varies")
    return math.prod(shape)
