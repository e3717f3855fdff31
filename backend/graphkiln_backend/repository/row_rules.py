"""What operators do along the axis of the rows: see `row_mixing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from graphkiln_backend.graph.dtypes import AnyArray

if TYPE_CHECKING:
    import onnx

_AXES_ARE_INPUTS = {"ReduceSum": 13, "Squeeze": 13, "Unsqueeze": 13}
"""Since which opset; other reductions: 18."""
_FLATTENED_BEFORE = 13
"""Opset before which a softmax took all axes from its own on together."""
_SELECTED_OUTPUTS = 14
"""Opset since which an attribute tells whether a BatchNormalization trains; before it, how many outputs it has."""


class Mixes(Exception):
    """A node computes a row from others."""

    def __init__(self, node: onnx.NodeProto, why: str) -> None:
        super().__init__(f"{node.op_type} '{node.name or node.output[0]}' {why}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a value are: an axis, out of `rank`."""

    axis: int
    rank: int


@dataclass(frozen=True, slots=True)
class Places:
    """What is known of the inputs of a node, one entry for each.

    Attributes:
        version: Opset of ONNX's own operators.
        places: Where their rows are; None for those that have none.
        ranks: Their dimensions, where they are known.
        constants: Small constants.
    """

    version: int
    places: tuple[Place | None, ...]
    ranks: tuple[int | None, ...]
    constants: tuple[AnyArray | None, ...]

    @property
    def data(self) -> Place | None:
        """The place of the first input, where no other has rows."""
        return self.places[0] if self.places and not any(self.places[1:]) else None

    def integers(self, index: int) -> list[int] | None:
        """A constant input as integers; None where it is left out or not known."""
        constant = self.constants[index] if index < len(self.constants) else None
        return None if constant is None else [int(number) for number in constant.ravel()]


Rule: TypeAlias = "Callable[[onnx.NodeProto, Places], Place | tuple[Place | None, ...] | None]"
"""Where the rows of the outputs are: None where that is not sure; `Mixes` where they are computed from each other."""


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def _integers(node: onnx.NodeProto, name: str) -> list[int] | None:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == name), None)


def _elementwise(_: onnx.NodeProto, known: Places) -> Place | None:
    if any(rank is None for rank in known.ranks):
        return None
    rank = max(rank or 0 for rank in known.ranks)
    aligned = {place.axis + rank - place.rank for place in known.places if place}
    return Place(aligned.pop(), rank) if len(aligned) == 1 else None


def _by_row(_: onnx.NodeProto, known: Places) -> Place | None:
    """Convolutions, pooling, trees and the like: rows come first."""
    return known.data if known.data and known.data.axis == 0 else None


def _tree(node: onnx.NodeProto, known: Places) -> tuple[Place | None, ...]:
    by_row = bool(known.data and known.data.axis == 0)
    ranks = (1, 2) if node.op_type.endswith("Classifier") else (2,)
    return tuple(Place(0, rank) if by_row else None for rank in ranks)


def _transpose(node: onnx.NodeProto, known: Places) -> Place | None:
    if not known.data:
        return None
    order = _integers(node, "perm") or list(range(known.data.rank))[::-1]
    return replace(known.data, axis=order.index(known.data.axis))


def _softmax(node: onnx.NodeProto, known: Places) -> Place | None:
    if not (place := known.data):
        return None
    flattens = known.version < _FLATTENED_BEFORE
    axis = _integer(node, "axis", 1 if flattens else -1) % place.rank
    if place.axis == axis or (flattens and place.axis > axis):
        raise Mixes(node, "runs along the rows")
    return place


def _along(default: int) -> Rule:
    """A rule for nodes that work along one axis, and keep the rank."""

    def rule(node: onnx.NodeProto, known: Places) -> Place | None:
        if known.data and known.data.axis == _integer(node, "axis", default) % known.data.rank:
            raise Mixes(node, "works along the rows")
        return known.data

    return rule


def _cumulative_sum(node: onnx.NodeProto, known: Places) -> Place | None:
    axes = known.integers(1)
    if known.data and axes and known.data.axis == axes[0] % known.data.rank:
        raise Mixes(node, "sums along the rows")
    return known.data if axes else None


def _normalization(node: onnx.NodeProto, known: Places) -> Place | None:
    """LayerNormalization and its like: from an axis to the last one."""
    if known.data and known.data.axis >= _integer(node, "axis", -1) % known.data.rank:
        raise Mixes(node, "normalizes over the rows")
    return known.data


def _batch_norm(node: onnx.NodeProto, known: Places) -> tuple[Place | None, ...] | None:
    trains = any(node.output[1:]) if known.version < _SELECTED_OUTPUTS else _integer(node, "training_mode", 0) == 1
    if trains and known.data:
        raise Mixes(node, "is in training mode: it normalizes by the statistics of all rows")
    return (_by_row(node, known),)


def _reduction(node: onnx.NodeProto, known: Places) -> Place | None:
    if not (place := known.data):
        return None
    if node.op_type.startswith("Arg"):
        axes: list[int] | None = [_integer(node, "axis", 0)]
    elif known.version >= _AXES_ARE_INPUTS.get(node.op_type, 18):
        named = len(node.input) > 1 and bool(node.input[1])
        axes = known.integers(1) if named else []
        if axes == [] and _integer(node, "noop_with_empty_axes", 0):
            return place
    else:
        axes = _integers(node, "axes") or []
    if axes is None:
        return None
    reduced = {axis % place.rank for axis in axes or range(place.rank)}
    if place.axis in reduced:
        raise Mixes(node, "takes the rows together")
    return place if _integer(node, "keepdims", 1) else _without(place, reduced)


def _without(place: Place, axes: set[int]) -> Place:
    return Place(place.axis - sum(axis < place.axis for axis in axes), place.rank - len(axes))


def _squeeze(node: onnx.NodeProto, known: Places) -> Place | None:
    axes = known.integers(1) if known.version >= _AXES_ARE_INPUTS["Squeeze"] else _integers(node, "axes")
    if not known.data or axes is None:
        return None
    taken = {axis % known.data.rank for axis in axes}
    return None if known.data.axis in taken else _without(known.data, taken)


def _unsqueeze(node: onnx.NodeProto, known: Places) -> Place | None:
    axes = known.integers(1) if known.version >= _AXES_ARE_INPUTS["Unsqueeze"] else _integers(node, "axes")
    if not known.data or axes is None:
        return None
    rank = known.data.rank + len(axes)
    new = {axis % rank for axis in axes}
    return Place([axis for axis in range(rank) if axis not in new][known.data.axis], rank)


def _reshape(node: onnx.NodeProto, known: Places) -> Place | None:
    shape = known.integers(1)
    if not known.data or known.data.axis != 0 or not shape or _integer(node, "allowzero", 0):
        return None
    return Place(0, len(shape)) if shape[0] == 0 else None


def _flatten(node: onnx.NodeProto, known: Places) -> Place | None:
    return Place(0, 2) if known.data and known.data.axis == 0 and _integer(node, "axis", 1) == 1 else None


def _matmul(node: onnx.NodeProto, known: Places) -> Place | None:
    (a, b), (rank_a, rank_b) = known.places[:2], known.ranks[:2]
    if rank_a is None or rank_b is None or min(rank_a, rank_b) < 2:
        return None
    if (a and a.axis == rank_a - 1) or (b and b.axis == rank_b - 2):
        raise Mixes(node, "sums over the rows")
    if a and b and (a.axis == rank_a - 2 or b.axis == rank_b - 1):
        raise Mixes(node, "multiplies rows by each other")
    return _elementwise(node, known)


def _gemm(node: onnx.NodeProto, known: Places) -> Place | None:
    a, b = known.places[:2]
    contracted = 0 if _integer(node, "transA", 0) else 1
    if a and a.axis == contracted:
        raise Mixes(node, "sums over the rows")
    if a and b:
        raise Mixes(node, "multiplies rows by each other")
    bias = known.places[2] if len(known.places) > 2 else None
    if a and bias and bias.axis == bias.rank - 1:  # the last axis of C is broadcast along the columns of every row
        raise Mixes(node, "adds numbers of all rows to each")
    return Place(0, 2) if a else None


def _recurrent(node: onnx.NodeProto, known: Places) -> tuple[Place | None, ...] | None:
    first = _integer(node, "layout", 0) == 1
    time, rows = (1, 0) if first else (0, 1)
    place = known.places[0]
    if place and place.axis == time:
        raise Mixes(node, "takes the first dimension for the time of a sequence")
    if not place or place.axis != rows:
        return None
    return (Place(0 if first else 2, 4), Place(rows, 3), Place(rows, 3))


def _gather(node: onnx.NodeProto, known: Places) -> Place | None:
    (data, indices), (rank, index_rank) = known.places[:2], known.ranks[:2]
    if rank is None or index_rank is None:
        return None
    axis = _integer(node, "axis", 0) % rank
    if indices and not data:
        return Place(indices.axis + axis, rank + index_rank - 1)
    if not data or indices or data.axis == axis:
        return None
    return Place(data.axis + (index_rank - 1 if data.axis > axis else 0), rank + index_rank - 1)


def _slice(node: onnx.NodeProto, known: Places) -> Place | None:
    axes = known.integers(3) if len(node.input) > 3 else None
    if not known.data or axes is None:
        return None
    return None if known.data.axis in {axis % known.data.rank for axis in axes} else known.data


def _concat(node: onnx.NodeProto, known: Places) -> Place | None:
    place = known.places[0]
    if not place or set(known.places) != {place}:
        return None
    return None if _integer(node, "axis", 0) % place.rank == place.axis else place


def _split(node: onnx.NodeProto, known: Places) -> Place | None:
    along = known.data and known.data.axis == _integer(node, "axis", 0) % known.data.rank
    return None if along else known.data


_ELEMENTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu "
    "Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN "
    "LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor Dropout"
)
_BY_ROW = (
    "AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv SpaceToDepth Binarizer Imputer Scaler "
    "QuantizeLinear DequantizeLinear"
)
_REDUCTIONS = (
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
_TREES = "LinearClassifier LinearRegressor TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor"
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_BY_ROW.split(), _by_row),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("LpNormalization", "TopK"), _along(-1)),
    **dict.fromkeys(_TREES.split(), _tree),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalization),
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "CumSum": _cumulative_sum,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Operator -> its rule."""
