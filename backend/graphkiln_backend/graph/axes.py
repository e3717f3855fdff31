"""Relations between the axes of the inputs and outputs of an operator: one table for all analyses of graphs.

A relation is written as in an einsum: axes with the same label correspond. Along such an axis, an element of an output
depends only on elements at the same index of the inputs with that label (and maybe on the index itself). This
determines whether rows of a batch are independent, how a fixed batch propagates, and how a product can be sharded.

Source: ONNX operator schemas, versions 1 to 25; the notation is that of sharding rules in OpenXLA's Shardy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Sizes of a tensor: integers, symbols (equal for equal sizes), or None.
Shape: TypeAlias = tuple[Any, ...]
# Label of each axis of a tensor; None for an axis that corresponds to no other.
Axes: TypeAlias = tuple[int | None, ...]

SUMS = "sums over"
REDUCES = "reduces over"
WORKS = "works along"
_NORMALIZES = "normalizes over"
_TIME = "steps through time along"

_AXES_ARE_INPUTS = {"ReduceSum": 13, "Squeeze": 13, "Unsqueeze": 13}  # opset of the change; other reductions: 18
_SOFTMAX_OF_ONE_AXIS = 13  # before this opset, softmax flattened all axes from `axis` on
_MODE_IS_ATTRIBUTE = 14  # before this opset, a BatchNormalization with several outputs was in training mode
_NUMPY_BROADCASTING = 7  # before this opset, attributes defined the broadcast of the second input
_MODE_IS_INPUT = 12  # Dropout: no training mode from opset 7 on, an attribute before
_SLICE_BY_INPUTS, _PAD_BY_INPUTS, _RESIZE_WITH_ROI, _TILE_BY_INPUTS = 10, 11, 11, 6
_LARGEST_INT32 = (1 << 31) - 1  # a slice that ends here or beyond is unbounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of a graph, independent of the library.

    Attributes:
        operator: Operator of ONNX's domains `ai.onnx` and `ai.onnx.ml`.
        opset: Version of `ai.onnx`.
        attributes: Integers, lists of integers and texts.
        inputs: Shapes; `()` for an omitted input, None for an unknown rank.
        outputs: Shapes, as for inputs.
        read_constant: Elements of an input, None unless it is a small constant; `[]` if it is omitted.
    """

    operator: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None]
    read_constant: Callable[[int], list[Any] | None]

    def rank(self, index: int) -> int | None:
        """Number of dimensions of an input."""
        shape = self.inputs[index] if index < len(self.inputs) else ()
        return None if shape is None else len(shape)

    def constant(self, index: int) -> list[Any] | None:
        """Elements of a constant input; `[]` if it is omitted, None if it is computed."""
        return self.read_constant(index) if index < len(self.inputs) else []

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from 0."""
        return int(self.attributes.get("axis", default)) % max(rank, 1)


@dataclass(frozen=True, slots=True)
class Relation:
    """Labels of the axes of a node's tensors.

    Attributes:
        inputs: Labels; None, or missing at the end, if all elements of the outputs may depend on the input.
        outputs: Labels; None, or missing at the end, if unknown.
        mixed: Labels along which elements are combined, with a verb for error messages.
    """

    inputs: Sequence[Axes | None]
    outputs: Sequence[Axes | None]
    mixed: Mapping[int, str] = field(default_factory=dict)

    def label(self, index: int, axis: int) -> int | None:
        """Label of an axis of an input, or None."""
        axes = self.inputs[index] if index < len(self.inputs) else None
        return axes[axis] if axes and axis < len(axes) else None


Rule: TypeAlias = Callable[[Node], Relation | None]
RankedRule: TypeAlias = Callable[[Node, int], Relation | None]


def relate(node: Node) -> Relation | None:
    """Look up the relation of a node; None for an unknown operator or computed axes."""
    rule, ranked_rule, rank = _RULES.get(node.operator), _RANKED_RULES.get(node.operator), node.rank(0)
    try:
        if rule:
            return rule(node)
        return ranked_rule(node, rank) if ranked_rule and rank is not None else None
    except (ArithmeticError, LookupError, TypeError, ValueError):  # invalid attributes or ranks
        return None


def reshape_places(source: Shape, target: Shape, axis: int, inner: int, extent: int) -> list[tuple[int, int]]:
    """Find the position of a factor of an axis after a reshape.

    Args:
        source: Shape before; sizes behind `axis` must be integers.
        target: Shape after.
        axis: Axis of the factor.
        inner: Product of the faster factors of the same axis.
        extent: Size of the factor.

    Returns:
        Possible positions as (axis, inner), last axis first. More than one only for an extent of 1.
    """
    if not all(isinstance(size, int) for size in source[axis + 1 :]):
        return []
    behind = inner * math.prod(source[axis + 1 :])
    places, passed = list[tuple[int, int]](), 1
    for number in range(len(target) - 1, -1, -1):
        size = target[number]
        if not isinstance(size, int):  # equal leading dimensions mean equal numbers of trailing blocks
            same = number <= axis and source[:number] == target[:number] and None not in target[:number]
            return [*places, (number, behind // passed)] if same and behind % passed == 0 else places
        if behind % passed == 0 and size % (behind // passed * extent) == 0:
            places.append((number, behind // passed))
        passed *= size
    return places


def _range(rank: int, *without: int) -> Axes:
    return tuple(None if axis in without else axis for axis in range(rank))


def _ints(node: Node, attribute: str, index: int, since: int) -> list[int] | None:
    """Integers of an attribute that became an input in a later opset."""
    found = node.constant(index) if node.opset >= since else node.attributes.get(attribute, [])
    return None if found is None else [int(number) for number in found]


def _axes_of(node: Node) -> list[int] | None:
    return _ints(node, "axes", 1, _AXES_ARE_INPUTS.get(node.operator, 18))


def _keep(
    rank: int | None, mixed: Mapping[int, str] | None = None, unknown: Sequence[int] = (), *, outputs: int = 1
) -> Relation | None:
    """Operator with one input and outputs of its rank, whose other axes are mixed or rearranged."""
    if rank is None:
        return None
    mixed = mixed or {}
    return Relation((_range(rank, *unknown),), (_range(rank, *unknown, *mixed),) * outputs, mixed)


def _broadcast(shapes: Sequence[Shape | None]) -> list[Axes] | None:
    """Labels of tensors that broadcast like in numpy; labels are the axes of the result."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    # Axes along which a size of 1 is repeated.
    wide = {at for shape in known for at, size in enumerate(shape, rank - len(shape)) if size != 1}
    return [
        tuple(None if size == 1 and at in wide else at for at, size in enumerate(shape, rank - len(shape)))
        for shape in known
    ]


def _aligned(shape: Shape | None, rank: int) -> Axes | None:
    """Labels of a tensor that is broadcast to another one, whose labels are its axes."""
    return (
        None if shape is None else tuple(None if size == 1 else at for at, size in enumerate(shape, rank - len(shape)))
    )


def _elementwise(node: Node) -> Relation | None:
    axes = _broadcast(node.inputs)
    if axes is None or (node.opset < _NUMPY_BROADCASTING and node.attributes.get("broadcast")):
        return None
    return Relation(axes, [_range(max(map(len, axes)))])


def _by_sample(_: Node, rank: int) -> Relation | None:
    """Convolution, pooling and similar: the first axis is that of the samples."""
    if rank < 2:
        return None
    # Indices of a MaxPool depend on the position of a sample in the batch, but not on other samples.
    return _keep(rank, unknown=range(1, rank), outputs=2)


def _tree(node: Node, rank: int) -> Relation | None:
    if rank != 2:
        return None
    scores = (0, None)
    return Relation([(0, None)], [(0,), scores] if node.operator.endswith("Classifier") else [scores])


def _dropout(node: Node) -> Relation | None:
    trains = node.constant(2) if node.opset >= _MODE_IS_INPUT else []
    if node.opset < 7 and not node.attributes.get("is_test"):
        return None
    return _keep(node.rank(0), outputs=2) if trains is not None and not any(trains) else None


def _transpose(node: Node, rank: int) -> Relation | None:
    return Relation([_range(rank)], [tuple(node.attributes.get("perm") or range(rank)[::-1])])


def _softmax(node: Node, rank: int) -> Relation | None:
    one = node.opset >= _SOFTMAX_OF_ONE_AXIS
    axis = node.axis(-1 if one else 1, rank)
    return _keep(rank, dict.fromkeys([axis] if one else range(axis, rank), WORKS))


def _along_axis(node: Node, rank: int) -> Relation | None:
    return _keep(rank, {node.axis(-1, rank): WORKS}, outputs=2)


def _cumulative_sum(node: Node, rank: int) -> Relation | None:
    axes = node.constant(1)
    return _keep(rank, {axes[0] % rank: SUMS}) if rank and axes else None


def _layer_norm(node: Node, rank: int) -> Relation | None:
    start = node.axis(-1, rank)
    scales = [_aligned(shape, rank) for shape in node.inputs[1:]]
    result = _range(rank, *range(start, rank))
    return Relation([_range(rank), *scales], [result] * 3, dict.fromkeys(range(start, rank), _NORMALIZES))


def _batch_norm(node: Node, rank: int) -> Relation | None:
    if rank < 2:
        return None
    given = [shape != () for shape in node.outputs[1:]]
    trains = any(given) if node.opset < _MODE_IS_ATTRIBUTE else node.attributes.get("training_mode", 0)
    mixed = {axis: _NORMALIZES for axis in range(rank) if axis != 1} if trains else {}
    return Relation([_range(rank), *[(1,)] * 4], [_range(rank, *mixed)], mixed)


def _mean_variance(node: Node, rank: int) -> Relation | None:
    return _keep(rank, {axis % rank: _NORMALIZES for axis in node.attributes.get("axes", (0, 2, 3))})


def _reduction(node: Node, rank: int) -> Relation | None:
    axes = [node.attributes.get("axis", 0)] if node.operator.startswith("Arg") else _axes_of(node)
    if axes is None:
        return None
    if not axes and node.attributes.get("noop_with_empty_axes"):
        return _keep(rank)
    reduced = {axis % rank for axis in axes or range(rank)}
    result = _range(rank, *reduced)
    if not node.attributes.get("keepdims", 1):
        result = tuple(axis for axis in result if axis is not None)
    return Relation([_range(rank)], [result], dict.fromkeys(reduced, REDUCES))


def _squeeze(node: Node) -> Relation | None:
    axes, shape = _axes_of(node), node.inputs[0]
    if axes is None or shape is None or (not axes and not all(isinstance(size, int) for size in shape)):
        return None
    taken = {axis % len(shape) for axis in axes} or {axis for axis, size in enumerate(shape) if size == 1}
    return Relation([_range(len(shape), *taken)], [tuple(axis for axis in range(len(shape)) if axis not in taken)])


def _unsqueeze(node: Node, rank: int) -> Relation | None:
    axes = _axes_of(node)
    if axes is None:
        return None
    made = {axis % (rank + len(axes)) for axis in axes}
    kept = iter(range(rank))
    return Relation([_range(rank)], [tuple(None if at in made else next(kept) for at in range(rank + len(axes)))])


def _reshape(node: Node, rank: int) -> Relation | None:
    """Copied leading dimensions; `reshape_places` follows a factor through any reshape."""
    target = node.constant(1)
    if not target or node.attributes.get("allowzero"):
        return None
    same = next((axis for axis, size in enumerate(target) if size), len(target))
    return Relation([_range(rank, *range(same, rank))], [_range(len(target), *range(same, len(target)))])


def _flatten(node: Node, rank: int) -> Relation | None:
    axis = node.attributes.get("axis", 1)
    axis += rank if axis < 0 else 0
    first, last = 0 if axis == 1 else None, rank - 1 if axis == rank - 1 else None
    return Relation([_range(rank, *(set(range(rank)) - {first, last}))], [(first, last)])


def _product(a: Shape | None, b: Shape | None) -> tuple[Axes, Axes, Axes, dict[int, str]] | None:
    """Labels of the factors and the result of a matrix product, and of its summed axis."""
    if not a or not b:
        return None
    left, right = _broadcast([a[:-2], b[:-2]]) or [(), ()]
    rank = max(len(left), len(right))
    row, column, inner = rank, rank + 1, rank + 2
    return (
        (*left, row, inner) if len(a) > 1 else (inner,),
        (*right, inner, column) if len(b) > 1 else (inner,),
        (*range(rank), *([row] if len(a) > 1 else []), *([column] if len(b) > 1 else [])),
        {inner: SUMS},
    )


def _matmul(node: Node) -> Relation | None:
    found = _product(node.inputs[0], node.inputs[1])
    return Relation(found[:2], found[2:3], found[3]) if found else None


def _quantized_matmul(node: Node) -> Relation | None:
    """MatMulInteger and QLinearMatMul: scales and zero points per tensor, row of A or column of B."""
    scales_first = node.operator == "QLinearMatMul"
    place = 3 if scales_first else 1
    found = _product(node.inputs[0], node.inputs[place])
    settings = [(at, shape) for at, shape in enumerate(node.inputs) if at not in (0, place)]
    if not found or any(shape is None or len(shape) > 1 for _, shape in settings):
        return None
    a, b, result, summed = found
    of_rows = (1, 2) if scales_first else (2,)
    labels = {0: a, place: b}
    for at, shape in settings:
        labels[at] = tuple(None if size == 1 else (a[-2:][0] if at in of_rows else b[-1]) for size in shape or ())
    return Relation([labels[at] for at in range(len(node.inputs))], [result], summed)


def _gemm(node: Node) -> Relation | None:
    row, column, inner = 0, 1, 2
    return Relation(
        [
            (inner, row) if node.attributes.get("transA") else (row, inner),
            (column, inner) if node.attributes.get("transB") else (inner, column),
            _aligned(node.inputs[2] if len(node.inputs) > 2 else (), 2),
        ],
        [(row, column)],
        {inner: SUMS},
    )


def _einsum(node: Node) -> Relation | None:
    equation = node.attributes["equation"]
    text = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    terms, arrow, result = text.partition("->")
    operands = terms.split(",")
    if not arrow or "." in text or any(len(set(term)) != len(term) for term in operands):
        return None
    labels = [tuple(map(ord, term)) for term in (*operands, result)]
    summed = {ord(letter): SUMS for term in operands for letter in term if letter not in result}
    return Relation(labels[:-1], labels[-1:], summed)


def _recurrent(node: Node) -> Relation | None:
    """LSTM, GRU and RNN: `[time, batch, features]`, or the batch first with `layout: 1`."""
    first = node.attributes.get("layout", 0) == 1
    time, rows = 0, 1
    state = (rows, None, None) if first else (None, rows, None)
    states = [state, state] if node.operator == "LSTM" else [state]
    data = (rows, time, None) if first else (time, rows, None)
    sequence = (rows, None, None, None) if first else (None, None, rows, None)
    return Relation([data, None, None, None, (rows,), *states], [sequence, state, state], {time: _TIME})


def _quantize(node: Node, rank: int) -> Relation | None:
    axis = node.axis(1, rank)
    if node.attributes.get("block_size"):
        return Relation([_range(rank, axis)] * len(node.inputs), [_range(rank, axis)])
    scales = [tuple(None if size == 1 else axis for size in shape or ()) for shape in node.inputs[1:]]
    return Relation([_range(rank), *scales], [_range(rank)])


def _gather(node: Node, rank: int) -> Relation | None:
    indices = node.rank(1)
    if indices is None:
        return None
    axis = node.axis(0, rank)
    picked = tuple(range(rank, rank + indices))
    return Relation([_range(rank, axis), picked], [(*range(axis), *picked, *range(axis + 1, rank))])


def _gather_elements(node: Node) -> Relation | None:
    data, indices = node.inputs[:2]
    if data is None or indices is None:
        return None
    axis = node.axis(0, len(data))
    result = tuple(at if at == axis or data[at] == size else None for at, size in enumerate(indices))
    return Relation([tuple(None if at == axis else label for at, label in enumerate(result)), result], [result])


def _gather_nd(node: Node) -> Relation | None:
    data, indices = node.inputs[:2]
    if data is None or not indices or not isinstance(indices[-1], int):
        return None
    shared = node.attributes.get("batch_dims", 0)
    named = range(shared, shared + indices[-1])
    own = tuple(len(data) + axis if axis >= shared else axis for axis in range(len(indices) - 1))
    rest = range(shared + indices[-1], len(data))
    return Relation([_range(len(data), *named), (*own, None)], [(*own, *rest)])


def _slice(node: Node, rank: int) -> Relation | None:
    starts, ends = (_ints(node, name, at, _SLICE_BY_INPUTS) for at, name in ((1, "starts"), (2, "ends")))
    axes, steps = (_ints(node, name, at, _SLICE_BY_INPUTS) for at, name in ((3, "axes"), (4, "steps")))
    if axes is None or (not axes and starts is None):
        return None
    axes = [axis % rank for axis in axes or range(len(starts or ()))]
    whole = set[int]()
    if starts and ends and steps is not None:
        whole = {
            axis
            for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=False)
            if (start, step) == (0, 1) and end >= _LARGEST_INT32
        }
    return _keep(rank, unknown=[axis for axis in axes if axis not in whole])


def _concat(node: Node) -> Relation | None:
    rank = next((len(shape) for shape in node.inputs if shape is not None), None)
    if rank is None:
        return None
    axes = _range(rank, node.axis(1, rank))
    return Relation([axes] * len(node.inputs), [axes])


def _split(node: Node, rank: int) -> Relation | None:
    return _keep(rank, unknown=[node.axis(0, rank)], outputs=len(node.outputs))


def _expand(node: Node) -> Relation | None:
    source, stated, found = node.inputs[0], node.constant(1), node.outputs[0]
    if source is None or (not stated and found is None):
        return None
    target: Sequence[Any] = stated or found or ()
    if len(target) < len(source):
        target = (*(1,) * (len(source) - len(target)), *target)
    kept = 1 if stated else None  # a size of 1 keeps the size of the input
    labels = tuple(
        at if target[at] in (size, kept) and target[at] is not None else None
        for at, size in enumerate(source, len(target) - len(source))
    )
    return Relation([labels], [_range(len(target))])


def _fill(node: Node) -> Relation | None:
    shape = node.outputs[0]
    return None if shape is None else Relation([(None,)], [_range(len(shape))])


def _tile(node: Node) -> Relation | None:
    repeats = node.constant(1)
    if not repeats or node.opset < _TILE_BY_INPUTS:
        return None
    return _keep(len(repeats), unknown=[axis for axis, times in enumerate(repeats) if times != 1])


def _pad(node: Node, rank: int) -> Relation | None:
    axes = node.constant(3)
    widths = _ints(node, "pads", 1, _PAD_BY_INPUTS)
    if axes is None or not widths:
        return None
    count = len(widths) // 2
    padded = [axis % rank for at, axis in enumerate(axes or range(count)) if widths[at] or widths[at + count]]
    return _keep(rank, unknown=padded)


def _resize(node: Node) -> Relation | None:
    shape = node.inputs[0]
    with_roi = node.opset >= _RESIZE_WITH_ROI
    scales, sizes = node.constant(2 if with_roi else 1), node.constant(3) if with_roi else []
    crops = "crop" in str(node.attributes.get("coordinate_transformation_mode"))
    adapts = "not_" in str(node.attributes.get("keep_aspect_ratio_policy"))  # not_larger, not_smaller
    if shape is None or scales is None or sizes is None or not (scales or sizes) or crops or adapts:
        return None
    axes = [axis % len(shape) for axis in node.attributes.get("axes") or range(len(shape))]
    same = [shape[axis] == size for axis, size in zip(axes, sizes, strict=False)] or [scale == 1 for scale in scales]
    changed = [axis for axis, kept in zip(axes, same, strict=False) if not kept]
    return _keep(len(shape), unknown=changed)


def _grid_sample(_: Node, rank: int) -> Relation | None:
    spatial = (None,) * (rank - 2)
    return Relation([(0, 1, *spatial), (0, *spatial, None)], [(0, 1, *spatial)])


def _one_hot(node: Node, rank: int) -> Relation | None:
    made = node.axis(-1, rank + 1)
    return Relation([_range(rank)], [(*range(made), None, *range(made, rank))])


def _triangle(_: Node, rank: int) -> Relation | None:
    return _keep(rank, unknown=[rank - 2, rank - 1])


_ELEMENTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil "
    "Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu "
    "Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where "
    "Xor"
)
_BY_SAMPLE = (
    "AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv SpaceToDepth Binarizer Imputer Scaler"
)
_REDUCTIONS = (
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
_TREES = "LinearClassifier LinearRegressor TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("MatMulInteger", "QLinearMatMul"), _quantized_matmul),
    "Concat": _concat,
    "ConstantOfShape": _fill,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Expand": _expand,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Resize": _resize,
    "Squeeze": _squeeze,
    "Tile": _tile,
}
# Rules that need the number of dimensions of the first input.
_RANKED_RULES: dict[str, RankedRule] = {
    **dict.fromkeys(_BY_SAMPLE.split(), _by_sample),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(_TREES.split(), _tree),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("LpNormalization", "TopK"), _along_axis),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantize),
    "BatchNormalization": _batch_norm,
    "CumSum": _cumulative_sum,
    "Flatten": _flatten,
    "Gather": _gather,
    "GridSample": _grid_sample,
    "MeanVarianceNormalization": _mean_variance,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
}
OPERATORS = frozenset((*_RULES, *_RANKED_RULES))
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
