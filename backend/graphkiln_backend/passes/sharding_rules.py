"""Propagation of cuts through single nodes, for tensor parallelism.

A tensor is cut along an axis into one equal part per shard. If the axis consists of several blocks, each block is cut:
query, key and value packed in one weight, or the heads of each sample of a batch.

Source: Y. Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021 (propagation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir

from graphkiln_backend.graph.axes import ELEMENTWISE, SUMS, Axes, Relation, reshape_places
from graphkiln_backend.passes.node_axes import relate, sizes

Value = onnx_ir.Value

_FOLLOWED = {
    *ELEMENTWISE,
    *("ConstantOfShape", "DequantizeLinear", "Expand", "Gather", "Gemm", "LayerNormalization", "LogSoftmax", "MatMul"),
    *("QuantizeLinear", "Reshape", "Slice", "Softmax", "Split", "Squeeze", "Transpose", "Unsqueeze"),
}
_SHAPE_INPUT = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}  # index of the input with the output shape
_BIAS = 2  # index of a Gemm's bias


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut through a tensor.

    Attributes:
        axis: Axis that is cut.
        block: Size of each block along the axis; the size of the axis if there is one block.
    """

    axis: int
    block: int

    def indices(self, size: int, shards: int, shard: int) -> Any:
        """Return the indices of a shard along the axis, INT64 `[size / shards]`."""
        blocks = np.arange(size).reshape(-1, shards, self.block // shards)
        return blocks[:, shard].reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """Effects of a cut on a node.

    Attributes:
        values: Cuts of the activations that the node reads and computes.
        weights: Input index -> cut of the weight.
        first_only: Input indices of weights that are zero in all but the first shard, so that they are summed once.
        target: Cut of an output whose shape is an input.
        shape_input: Index of the input with the output shape.
        divided: Input indices of weights that contain sizes of the cut dimension, to be divided by the shards.
        reduced: The output is a partial sum.
    """

    values: Mapping[Value, Cut] = field(default_factory=dict)
    weights: Mapping[int, Cut] = field(default_factory=dict)
    first_only: frozenset[int] = frozenset()
    target: Cut | None = None
    shape_input: int = 1
    divided: frozenset[int] = frozenset()
    reduced: bool = False


class CannotShard(Exception):
    """A cut cannot be propagated; the message is the reason."""


def is_weight(value: Value | None) -> bool:
    """Return True for a weight with known content."""
    return value is not None and value.is_initializer() and value.const_value is not None


def holds_weights(value: Value | None) -> bool:
    """Return True for a weight or a dequantized weight."""
    node = value.producer() if value is not None else None
    return is_weight(value) or (node is not None and node.op_type == "DequantizeLinear" and is_weight(node.inputs[0]))


def check_divides(value: Value, cut: Cut, shards: int) -> None:
    """Raise `CannotShard` if a tensor cannot be cut into equal parts."""
    size = dims(value)[cut.axis]
    if cut.block % shards or (isinstance(size, int) and size % cut.block):
        raise CannotShard(f"dimension {cut.axis} of '{value.name}' is {size}, which {shards} does not divide")


def dims(value: Value | None) -> list[Any]:
    """Return the shape of a tensor, or raise `CannotShard` if it is unknown."""
    if value is None or value.shape is None:
        raise CannotShard(f"the shape of '{value.name if value else 'a tensor'}' is unknown")
    return list(value.shape)


def add_weight(model: onnx_ir.Model, name: str, array: Any) -> Value:
    """Add a weight to a graph; the name must be unique."""
    tensor = onnx_ir.tensor(np.ascontiguousarray(array), name=name)
    weight = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(weight)
    return weight


def follow_cuts(node: onnx_ir.Node, cuts: Mapping[Value, Cut], shards: int) -> Effects:
    """Propagate known cuts to the other tensors of a node.

    Args:
        node: A node that reads or computes a cut tensor.
        cuts: Known cuts of activations.
        shards: Number of shards.

    Raises:
        CannotShard: The node needs a whole tensor, or the operator is not supported.
    """
    if node.op_type not in _FOLLOWED or node.domain not in ("", "ai.onnx"):
        raise CannotShard(f"{node.op_type} {node.name} has no rule")
    if node.op_type == "Reshape":
        return _reshape(node, cuts, shards)
    relation = relate(node)
    if relation is None:
        raise CannotShard(f"the axes of {node.name} are not known")
    if node.op_type == "Split" and (found := _split_blocks(node, relation, cuts, shards)):
        return found
    label, block = _label(node, relation, cuts)
    values, weights = dict[Value, Cut](), dict[int, Cut]()
    for number, axes, value in _labelled(node.inputs, relation.inputs, label):
        cut = Cut(axes.index(label), block)
        if is_weight(value):
            check_divides(value, cut, shards)
            weights[number] = cut
        else:
            values[value] = cut
    values |= {
        value: Cut(axes.index(label), block) for _, axes, value in _labelled(node.outputs, relation.outputs, label)
    }
    _check_equal(node, values, weights)
    if label in relation.mixed:
        return _partial_sum(node, Effects(values=values, weights=weights, reduced=True), relation.mixed[label])
    if node.op_type in _SHAPE_INPUT:
        target, shape_input = values[node.outputs[0]], _SHAPE_INPUT[node.op_type]
        _check_stated(node, shape_input, target)
        return Effects(values=values, weights=weights, target=target, shape_input=shape_input)
    return Effects(values=values, weights=weights)


def _labelled(tensors: Any, labels: Any, label: int) -> list[tuple[int, Axes, Value]]:
    """Return the tensors with an axis label: index, axes, value."""
    pairs = enumerate(zip(tensors, labels, strict=False))
    return [(number, axes, value) for number, (value, axes) in pairs if value is not None and axes and label in axes]


def _label(node: onnx_ir.Node, relation: Relation, cuts: Mapping[Value, Cut]) -> tuple[int, int]:
    """Return the label of the cut axes, and the block size."""
    found = set[tuple[int, int]]()
    for tensors, labels in ((node.inputs, relation.inputs), (node.outputs, relation.outputs)):
        for number, value in enumerate(tensors):
            if value is None or value not in cuts:
                continue
            cut, axes = cuts[value], labels[number] if number < len(labels) else None
            label = axes[cut.axis] if axes else None
            if label is None:
                raise CannotShard(f"{node.name} needs the whole of dimension {cut.axis} of '{value.name}'")
            found.add((label, cut.block))
    if len(found) != 1:
        raise CannotShard(f"{node.name} would be cut in {len(found)} ways")
    return found.pop()


def _check_equal(node: onnx_ir.Node, values: Mapping[Value, Cut], weights: Mapping[int, Cut]) -> None:
    cuts = [*values.items(), *((node.inputs[number], cut) for number, cut in weights.items())]
    found = {str(dims(value)[cut.axis]) for value, cut in cuts}
    if len(found) != 1 or "?" in found or "None" in found:
        raise CannotShard(f"{node.name} combines sizes that may differ")


def _partial_sum(node: onnx_ir.Node, effects: Effects, verb: str) -> Effects:
    """Return the effects on a product whose weight is cut by rows."""
    if verb != SUMS or not holds_weights(node.inputs[1]):
        raise CannotShard(f"{node.name} {verb} the dimension that is cut")
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    if bias is None:
        return effects
    if not holds_weights(bias):
        raise CannotShard(f"{node.name} adds a computed tensor")
    return Effects(values=effects.values, weights=effects.weights, first_only=frozenset([_BIAS]), reduced=True)


def _split_blocks(node: onnx_ir.Node, relation: Relation, cuts: Mapping[Value, Cut], shards: int) -> Effects | None:
    """Return the effects on a Split into whole blocks (query, key, value); None if it splits another dimension."""
    data = node.inputs[0]
    found = {cuts[value] for value in (data, *node.outputs) if value is not None and value in cuts}
    cut = found.pop() if len(found) == 1 else None
    axes = relation.inputs[0]
    if cut is None or data is None or axes is None or axes[cut.axis] is not None:
        return None
    outputs = [dims(value)[cut.axis] for value in node.outputs]
    if any(not isinstance(size, int) or size % cut.block for size in outputs) or cut.block % shards:
        raise CannotShard(f"{node.name} needs the whole of dimension {cut.axis}")
    stated = node.inputs[1] if len(node.inputs) > 1 else None
    if is_weight(data) or (stated is not None and not is_weight(stated)):
        raise CannotShard(f"{node.name} splits a weight, or computes its sizes")
    divided = frozenset([1]) if stated is not None else frozenset[int]()
    return Effects(values=dict.fromkeys((data, *node.outputs), cut), divided=divided)


def _reshape(node: onnx_ir.Node, cuts: Mapping[Value, Cut], shards: int) -> Effects:
    data, out = node.inputs[0], node.outputs[0]
    if data is None:
        raise CannotShard(f"{node.name} reads nothing")
    fed, got = cuts.get(data), cuts.get(out)
    target = got or _moved(data, fed, out, shards)
    source = fed or _moved(out, got, data, shards)
    if _moved(data, source, out, shards) != target:
        raise CannotShard(f"{node.name} does not split at block boundaries")
    _check_stated(node, 1, target)
    return Effects(values={data: source, out: target}, target=target)


def _moved(data: Value, cut: Cut | None, out: Value, shards: int) -> Cut:
    """Convert a cut to another shape of the same elements."""
    before, after = sizes(data), sizes(out)
    if cut is None or before is None or after is None:
        raise CannotShard(f"the shapes of '{data.name}' and '{out.name}' are unknown")
    places = reshape_places(before, after, cut.axis, cut.block // shards, shards)
    if not places:
        raise CannotShard(f"no dimension of '{out.name}' corresponds to the cut of '{data.name}'")
    axis, inner = places[0]
    return Cut(axis, inner * shards)


def _check_stated(node: onnx_ir.Node, number: int, target: Cut) -> None:
    """Raise `CannotShard` if the shape input cannot be changed to the size of a shard."""
    shape, found = node.inputs[number], dims(node.outputs[0])
    if not is_weight(shape) and (not isinstance(found[target.axis], int) or dims(shape) != [len(found)]):
        raise CannotShard(f"{node.name} computes its shape")


def state_size(model: onnx_ir.Model, node: onnx_ir.Node, effects: Effects, shards: int) -> None:
    """Replace the cut dimension of a computed shape with the size of a shard, in place.

    Args:
        model: The graph.
        node: A node with a shape input; its output still has the whole shape.
        effects: Effects of the cut on the node.
        shards: Number of shards.
    """
    target = effects.target
    shape = node.inputs[effects.shape_input] if target else None
    if target is None or shape is None or is_weight(shape):
        return
    whole = dims(node.outputs[0])
    here = np.arange(len(whole)) == target.axis
    local = np.full(len(whole), whole[target.axis] // shards, np.int64)
    name = f"{shape.name}_of_{node.name or node.outputs[0].name}"
    weights = [add_weight(model, f"{name}_{part}", array) for part, array in (("here", here), ("size", local))]
    stated = onnx_ir.node("Where", [*weights, shape], name=f"{name}_stated")
    result = stated.outputs[0]
    result.name, result.shape, result.type = f"{name}_stated", shape.shape, onnx_ir.TensorType(onnx_ir.DataType.INT64)
    model.graph.insert_before(node, stated)
    node.replace_input_with(effects.shape_input, result)
