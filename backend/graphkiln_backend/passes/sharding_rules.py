"""How a cut through one tensor of a node cuts its others: the rules by which products are sharded.

Source: Y. Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021 (propagation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir

# Cuts through the tensors of a graph whose products are sharded.
#
# A tensor is cut along an axis into as many equal parts as there are shards. Where that axis holds several blocks
# behind each other, each block is cut: queries, keys and values in one weight, or the heads of each sample of a batch.

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


Facts = Mapping[Value, Cut]  # the cuts that are known
# Node, known cuts, number of shards -> what follows; raises `CannotShard`.
Rule = Callable[[onnx_ir.Node, Facts, int], Effects]


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


# How cuts go through nodes that make other shapes: reshaped, split, repeated, filled and looked up tensors.
#
# Where the shape of an output is an input of the node, its size along the cut is written down for a shard: in a shape
# that is a weight, or over one that is computed.


def reshaped(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Reshape: whole parts stay together."""
    data, out = node.inputs[0], node.outputs[0]
    if data is None:
        raise CannotShard(f"{node.name} reads nothing")
    fed, got = fact_of(facts, data), fact_of(facts, out)
    target = got or _carried(data, fed, out, shards)
    source = fed or _carried(out, got, data, shards)
    if _carried(data, source, out, shards) != target:
        raise CannotShard(f"{node.name} does not keep parts together")
    _check_stated(node, 1, target)
    return Effects(values={data: source, out: target}, target=target)


def split_along(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Split: along another dimension than the cut, or into outputs of whole blocks, as queries, keys and values."""
    data = node.inputs[0]
    cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
    axis = node.attributes.get_int("axis", 0) % len(dims(node.outputs[0]))
    if data is None or is_weight(data):
        raise CannotShard(f"{node.name} reads a weight")
    values = dict.fromkeys((data, *node.outputs), cut)
    if cut.axis != axis:
        return Effects(values=values)
    sizes = [dims(value)[axis] for value in node.outputs]
    if any(not isinstance(size, int) or size % cut.block for size in sizes) or cut.block % shards:
        raise CannotShard(f"{node.name} needs the whole of dimension {axis}")
    stated = node.inputs[1] if len(node.inputs) > 1 else None
    if stated is not None and not is_weight(stated):
        raise CannotShard(f"{node.name} computes its sizes")
    return Effects(values=values, divided=frozenset([1]) if stated is not None else frozenset())


def filled(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:  # noqa: ARG001 - as all rules
    """A ConstantOfShape: a shard makes its part."""
    out = node.outputs[0]
    cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
    _check_stated(node, 0, cut)
    return Effects(values={out: cut}, target=cut, shape_input=0)


def expanded(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """An Expand: what is repeated along the cut is whole in every shard, what is there once or more is cut."""
    data, out = node.inputs[0], node.outputs[0]
    if data is None:
        raise CannotShard(f"{node.name} reads nothing")
    more = len(dims(out)) - len(dims(data))
    fed, got = fact_of(facts, data), fact_of(facts, out)
    cut = only_cut((*([Cut(fed.axis + more, fed.block)] if fed else []), *([got] if got else [])), node)
    _check_stated(node, 1, cut)
    axis = cut.axis - more
    if axis < 0 or dims(data)[axis] == 1:
        if fed:
            raise CannotShard(f"{node.name} repeats what is cut")
        return Effects(values={out: cut}, target=cut)
    if dims(data)[axis] != dims(out)[cut.axis]:
        raise CannotShard(f"{node.name} combines sizes that are not known to be equal")
    if is_weight(data):
        weights = checked(node, {0: Cut(axis, cut.block)}, shards)
        return Effects(values={out: cut}, weights=weights, target=cut)
    return Effects(values={data: Cut(axis, cut.block), out: cut}, target=cut)


def looked_up(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Gather in a table: columns of the table, as the positions' biases of heads; or of an activation: kept axes."""
    table, out = node.inputs[0], node.outputs[0]
    if table is None or node.inputs[1] is None:
        raise CannotShard(f"{node.name} reads nothing")
    kept = len(dims(node.inputs[1]))
    axis = node.attributes.get_int("axis", 0) % len(dims(table))
    origin = [*range(axis), *[-1] * kept, *range(axis + 1, len(dims(table)))]
    fed, got = fact_of(facts, table), fact_of(facts, out)
    if got and origin[got.axis] < 0:
        raise CannotShard(f"{node.name} makes dimension {got.axis}")
    if is_weight(table):
        if got is None:
            raise CannotShard(f"{node.name} looks up what is cut")
        return Effects(values={out: got}, weights=checked(node, {0: Cut(origin[got.axis], got.block)}, shards))
    if not is_weight(node.inputs[1]):
        raise CannotShard(f"{node.name} reads what is computed")
    if got:
        return Effects(values={table: Cut(origin[got.axis], got.block), out: got})
    if fed is None or fed.axis not in origin:
        raise CannotShard(f"{node.name} takes away what is cut")
    return Effects(values={table: fed, out: Cut(origin.index(fed.axis), fed.block)})


def state_size(model: onnx_ir.Model, node: onnx_ir.Node, effects: Effects, shards: int) -> None:
    """Writes over a computed shape what a shard has of the dimension that is cut, in place.

    Args:
        model: The graph.
        node: Reads the shape of its output; that output still has the whole's.
        effects: What follows for it.
        shards: How many there are.
    """
    target = effects.target
    shape = node.inputs[effects.shape_input] if target else None
    if target is None or shape is None or is_weight(shape):
        return
    sizes = dims(node.outputs[0])
    here = np.arange(len(sizes)) == target.axis
    local = np.full(len(sizes), sizes[target.axis] // shards, np.int64)
    name = f"{shape.name}_of_{node.name or node.outputs[0].name}"
    weights = [add_weight(model, f"{name}_{what}", array) for what, array in (("here", here), ("size", local))]
    stated = onnx_ir.node("Where", [*weights, shape], name=f"{name}_stated")
    result = stated.outputs[0]
    result.name, result.shape, result.type = f"{name}_stated", shape.shape, onnx_ir.TensorType(onnx_ir.DataType.INT64)
    model.graph.insert_before(node, stated)
    node.replace_input_with(effects.shape_input, result)


def _check_stated(node: onnx_ir.Node, number: int, target: Cut) -> None:
    """Raises `CannotShard` where a shard's size along the cut could not be written down."""
    shape, sizes = node.inputs[number], dims(node.outputs[0])
    if is_weight(shape):
        return
    if not isinstance(sizes[target.axis], int) or dims(shape) != [len(sizes)]:
        raise CannotShard(f"{node.name} computes its shape")


def _carried(data: Value, cut: Cut | None, out: Value, shards: int) -> Cut:
    """A cut through a tensor as one through the same elements in another shape.

    A cut tensor is a row of blocks, each of which is cut into equal parts; the blocks stay what they are.
    """
    if cut is None:
        raise CannotShard(f"nothing is known of '{data.name}'")
    source, target = dims(data), dims(out)
    block, behind = cut.block * elements(source[cut.axis + 1 :]), 1
    for axis in range(len(target) - 1, -1, -1):
        size = target[axis]
        if not isinstance(size, int) or size * behind >= block:
            whole = isinstance(size, int) or _begins_alike(source, cut.axis, target[:axis])
            own = block // behind
            if block % behind or own % shards or not whole or (isinstance(size, int) and size % own):
                break
            return Cut(axis, own)
        behind *= size
    raise CannotShard(f"'{out.name}' has no dimension that holds whole parts of '{data.name}'")


def _begins_alike(source: list[Any], axis: int, before: list[Any]) -> bool:
    """Whether dimensions before a cut are those before another one, so that as many blocks lie behind both."""
    return len(before) <= axis and source[: len(before)] == before


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
# Operator -> its rule. A graph is sharded as far as rules reach; the rest every shard computes whole.
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
