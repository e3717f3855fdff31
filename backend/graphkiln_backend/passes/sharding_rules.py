"""How a cut through one tensor of a node cuts its others: the rules by which products are sharded.

Source: Y. Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021 (propagation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx_ir

from graphkiln_backend.passes.sharding_cuts import (
    CannotShard,
    Cut,
    Effects,
    Facts,
    Rule,
    Value,
    checked,
    cuts_of,
    dims,
    fact_of,
    holds_weights,
    is_weight,
    only_cut,
)
from graphkiln_backend.passes.sharding_shapes import expanded, filled, looked_up, reshaped, split_along


def _product(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    left, right, *bias = node.inputs
    if not holds_weights(right):
        return _activation_product(node, facts)
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB") == 1
    flipped = node.op_type == "Gemm" and node.attributes.get_int("transA") == 1
    if holds_weights(left) or len(dims(right)) != 2 or flipped:
        raise CannotShard(f"{node.name} is no product of an activation and a matrix of weights")
    columns, rows = (0, 1) if transposed else (1, 0)
    fed, got = fact_of(facts, left), fact_of(facts, node.outputs[0])
    if fed and fed.axis == len(dims(left)) - 1:
        if got:
            raise CannotShard(f"{node.name} would be cut twice")
        only = frozenset([2]) if bias and bias[0] is not None else frozenset[int]()
        if only and not holds_weights(bias[0]):
            raise CannotShard(f"{node.name} adds something that is no weight")
        return replace(_cut_inputs(node, {1: Cut(rows, fed.block)}, shards), first_only=only, reduced=True)
    if got and got.axis == len(dims(node.outputs[0])) - 1:
        if fed:
            raise CannotShard(f"{node.name} would be cut twice")
        cuts = {1: Cut(columns, got.block)}
        if bias and bias[0] is not None and dims(bias[0])[-1:] == [dims(right)[columns]]:
            cuts[2] = Cut(len(dims(bias[0])) - 1, got.block)
        return _cut_inputs(node, cuts, shards)
    cut = fed or got
    return Effects(values={left: cut, node.outputs[0]: cut} if left and cut else {})


def _cut_inputs(node: onnx_ir.Node, cuts: Mapping[int, Cut], shards: int) -> Effects:
    """Cuts through inputs that hold weights, by number; those that are dequantized are cut where that is done."""
    own = {number: cut for number, cut in cuts.items() if is_weight(node.inputs[number])}
    others = ((node.inputs[number], cut) for number, cut in cuts.items() if number not in own)
    values = {value: cut for value, cut in others if value is not None}
    return Effects(values=values, weights=checked(node, own, shards))


def _activation_product(node: onnx_ir.Node, facts: Facts) -> Effects:
    """A product of two activations, such as queries and keys: along the heads both are cut, and what comes of them."""
    left, right, out = node.inputs[0], node.inputs[1], node.outputs[0]
    rank = len(dims(out))
    if node.op_type != "MatMul" or left is None or right is None or len(dims(left)) != rank or len(dims(right)) != rank:
        raise CannotShard(f"{node.name} multiplies tensors of different ranks")
    found: dict[Value, Cut] = {}
    for value in (left, right, out):
        cut = facts.get(value)
        if cut is None:
            continue
        if cut.axis < rank - 2:
            if dims(left)[cut.axis] != dims(right)[cut.axis]:
                raise CannotShard(f"{node.name} repeats one of its inputs")
            found |= dict.fromkeys((left, right, out), cut)
        elif (value is left, cut.axis) in ((True, rank - 1), (False, rank - 2)) and value is not out:
            raise CannotShard(f"{node.name} sums over what is cut")
        else:
            found |= dict.fromkeys((left if cut.axis == rank - 2 else right, out), cut)
    return Effects(values=found)


def _quantized(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """To and from integers: scales and zero points along the dimension that is cut are cut with it."""
    data, out = node.inputs[0], node.outputs[0]
    cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
    if data is None or node.attributes.get_int("block_size"):
        raise CannotShard(f"{node.name} has a scale for each block")
    scales = {number: value for number, value in enumerate(node.inputs) if number and value is not None}
    if not all(map(is_weight, scales.values())):
        raise CannotShard(f"{node.name} computes its scales")
    along = node.attributes.get_int("axis", 1) % len(dims(out)) == cut.axis
    cuts = {number: Cut(0, cut.block) for number, value in scales.items() if along and dims(value) not in ([], [1])}
    if is_weight(data):
        return Effects(values={out: cut}, weights=checked(node, {0: cut, **cuts}, shards))
    return Effects(values={data: cut, out: cut}, weights=checked(node, cuts, shards))


def _elementwise(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    out = node.outputs[0]
    rank = len(dims(out))
    cuts = {Cut(cut.axis + rank - len(dims(value)), cut.block) for value, cut in cuts_of(node, facts)}
    cut = only_cut(cuts, node)
    values, weights = {out: cut}, dict[int, Cut]()
    for number, value in enumerate(node.inputs):
        axis = cut.axis - rank + len(dims(value)) if value is not None else -1
        if value is None or axis < 0 or dims(value)[axis] == 1:
            if value is not None and value in facts:
                raise CannotShard(f"{node.name} repeats what is cut")
            continue
        if dims(value)[axis] != dims(out)[cut.axis]:
            raise CannotShard(f"{node.name} combines sizes that are not known to be equal")
        if is_weight(value):
            weights[number] = Cut(axis, cut.block)
        else:
            values[value] = Cut(axis, cut.block)
    return Effects(values=values, weights=checked(node, weights, shards))


def _same_axis(taken: Callable[[onnx_ir.Node, int], set[int]]) -> Rule:
    """A rule of nodes that leave all axes where they are and treat all but some alike."""

    def rule(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:  # noqa: ARG001 - as all rules
        cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
        if cut.axis in taken(node, len(dims(node.outputs[0]))):
            raise CannotShard(f"{node.name} needs the whole of dimension {cut.axis}")
        data, *others = node.inputs
        if data is None or any(value in facts for value in others if value is not None):
            raise CannotShard(f"{node.name} reads something else that is cut")
        return Effects(values=dict.fromkeys((data, *node.outputs), cut))

    return rule


def _moved_axis(move: Callable[[onnx_ir.Node, int], list[int]]) -> Rule:
    """A rule of nodes of one activation that move axes: `move` gives the axis of the input for each of the output."""

    def rule(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:  # noqa: ARG001 - as all rules
        data, out = node.inputs[0], node.outputs[0]
        if data is None or is_weight(data):
            raise CannotShard(f"{node.name} reads a weight")
        origin = move(node, len(dims(out)))
        fed, got = fact_of(facts, data), fact_of(facts, out)
        if got:
            axis = origin[got.axis]
            if axis < 0:
                raise CannotShard(f"{node.name} makes dimension {got.axis}")
            return Effects(values={data: Cut(axis, got.block), out: got})
        if fed is None or fed.axis not in origin:
            raise CannotShard(f"{node.name} takes away what is cut")
        return Effects(values={data: fed, out: Cut(origin.index(fed.axis), fed.block)})

    return rule


def _transposed(node: onnx_ir.Node, rank: int) -> list[int]:
    return list(node.attributes.get_ints("perm", tuple(reversed(range(rank)))))


def _squeezed(node: onnx_ir.Node, rank: int) -> list[int]:
    taken = _axes(node, rank + len(_constants(node, 1)))
    return [axis for axis in range(rank + len(taken)) if axis not in taken]


def _unsqueezed(node: onnx_ir.Node, rank: int) -> list[int]:
    made = _axes(node, rank)
    origin = iter(range(rank))
    return [-1 if axis in made else next(origin) for axis in range(rank)]


def _normalized(node: onnx_ir.Node, rank: int) -> set[int]:
    return set(range(node.attributes.get_int("axis", -1) % rank, rank))


def _one_axis(default: int) -> Callable[[onnx_ir.Node, int], set[int]]:
    return lambda node, rank: {node.attributes.get_int("axis", default) % rank}


def _sliced(node: onnx_ir.Node, rank: int) -> set[int]:
    if len(node.inputs) < 4 or not is_weight(node.inputs[3]):
        raise CannotShard(f"{node.name} does not say which dimensions it cuts")
    return {axis % rank for axis in _constants(node, 3)}


def _axes(node: onnx_ir.Node, rank: int) -> set[int]:
    return {axis % rank for axis in _constants(node, 1)}


def _constants(node: onnx_ir.Node, number: int) -> list[int]:
    value = node.inputs[number] if number < len(node.inputs) else None
    if value is None or not is_weight(value) or value.const_value is None:
        raise CannotShard(f"{node.name} computes its axes")
    return [int(each) for each in value.const_value.numpy().reshape(-1)]


_ELEMENTWISE = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Where", "Min", "Max", "Mod", "Equal", "Less", "Greater", "And", "Or", "Not"),
    *("Relu", "LeakyRelu", "Clip", "Elu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu", "Erf", "Mish"),
    *("Softplus", "Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Sin", "Cos", "Floor", "IsNaN", "Cast", "Identity"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "MatMul": _product,
    "Gemm": _product,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantized),
    "Softmax": _same_axis(_one_axis(-1)),
    "LogSoftmax": _same_axis(_one_axis(-1)),
    "LayerNormalization": _same_axis(_normalized),
    "Split": split_along,
    "Slice": _same_axis(_sliced),
    "Reshape": reshaped,
    "Expand": expanded,
    "ConstantOfShape": filled,
    "Transpose": _moved_axis(_transposed),
    "Squeeze": _moved_axis(_squeezed),
    "Unsqueeze": _moved_axis(_unsqueezed),
    "Gather": looked_up,
}
"""Operator -> its rule. A graph is sharded as far as rules reach; the rest every shard computes whole."""
