"""Where each operator leaves the batch.

Source: ONNX operator schemas, version 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH

# Follows the batch through a graph of fixed shapes, and repairs where its size is baked in.

# What the nodes of a graph leave to their defaults.


def find_attribute(node: onnx_ir.Node, name: str, opset: int) -> onnx_ir.Attr | None:
    """An attribute of a node, or the default that ONNX gives it; None where it has neither.

    Args:
        node: Of ONNX's own operators.
        name: Of the attribute.
        opset: Version of ONNX's operators that the graph is written in.
    """
    if name in node.attributes:
        return node.attributes[name]
    known = onnx.defs.get_schema(node.op_type, opset).attributes
    default = known[name].default_value if name in known else None
    return onnx_ir.from_proto(default) if default is not None and default.type else None


Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Where a value carries the batch: `axis` has the size `before * batch * after`, the last varying fastest."""

    axis: int
    before: int = 1
    after: int = 1

    def __str__(self) -> str:
        factors = (str(size) if size != 1 else "" for size in (self.before, self.after))
        size = "*".join(factor for factor in (next(factors), BATCH, next(factors)) if factor)
        return f"axis {self.axis} of size {size}"


def name_batch(value: Value, batch: BatchAxis) -> None:
    """Names the batch in a value's shape."""
    if value.shape is None:
        return
    factor = batch.before * batch.after
    dims = list(value.shape)
    dims[batch.axis] = onnx_ir.SymbolicDim(BATCH if factor == 1 else f"{factor}*{BATCH}")
    value.shape = onnx_ir.Shape(dims)


class ExpandedToBatch(Exception):
    """A constant was expanded to the saved batch further up: it carries the batch from there on.

    Attributes:
        value: The Expand's output.
        axis: Where it carries the batch.
    """

    def __init__(self, value: Value, axis: BatchAxis) -> None:
        super().__init__(str(value.name))
        self.value = value
        self.axis = axis


class Follower:
    """Follows the batch from node to node. Nothing is changed before `repair`.

    Attributes:
        model: The graph.
        batch: The batch size that it was saved with.
        axes: Value -> where it carries the batch; others do not.
        expanded: Constants that are known to be expanded to the batch -> where they carry it.
        open_choices: Nodes that may leave the batch in several places, in order -> how many.
    """

    def __init__(
        self, model: onnx_ir.Model, batch: int, expanded: Mapping[Value, BatchAxis], choices: Mapping[onnx_ir.Node, int]
    ) -> None:
        self.model = model
        self.batch = batch
        self.axes = {value: BatchAxis(0) for value in model.graph.inputs}
        self.expanded = expanded
        self.open_choices: dict[onnx_ir.Node, int] = {}
        self._choices = choices
        self._repairs: list[Callable[[], None]] = []
        self._counted: Value | None = None

    def repair(self) -> None:
        """Changes what has the saved batch baked in."""
        for repair in self._repairs:
            repair()

    def expand_here(self, node: onnx_ir.Node) -> BatchAxis:
        """Lets an Expand of a constant go to the batch of each request."""
        (result,) = node.outputs
        batch, shape = self.expanded[result], self.shape(result)
        self._repairs.append(lambda: node.replace_input_with(1, self._target(node, f"{node.name}/batch", shape, batch)))
        return batch

    def reaches(self, node: onnx_ir.Node) -> bool:
        """Whether the batch comes into a node, or into a graph inside it."""
        inner = (nested for attribute in node.attributes.values() for nested in _inner_nodes(attribute))
        return any(value in self.axes for each in (node, *inner) for value in each.inputs if value is not None)

    def error(self, node: onnx_ir.Node, why: str) -> ConversionError:
        """The error of a node that does not let the batch vary."""
        return ConversionError(
            f"the saved batch of {self.batch} cannot be made to vary: {node.op_type} '{node.name}': {why}",
            hint="a model that treats the samples of a batch alike can: look at this place of it",
        )

    def shape(self, value: Value | None) -> tuple[int, ...]:
        """A value's shape as saved.

        Raises:
            ConversionError: It is not known.
        """
        if value is None or value.shape is None or not value.shape.is_static():
            raise ConversionError(f"the shape of '{value.name if value else ''}' is not known")
        return tuple(int(dim) for dim in value.shape.numpy())

    def required(self, node: onnx_ir.Node, index: int) -> Value:
        """An input that must not be left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise self.error(node, f"input {index} is missing")
        return value

    def attribute(self, node: onnx_ir.Node, name: str) -> onnx_ir.Attr | None:
        """An attribute of a node, or its default; None where it has neither."""
        return find_attribute(node, name, self.model.opset_imports.get("") or 1)

    def integer(self, node: onnx_ir.Node, name: str) -> int:
        """The number that an attribute is, or is by default."""
        attribute = self.attribute(node, name)
        if attribute is None:
            raise self.error(node, f"its attribute {name} is missing")
        return attribute.as_int()

    def data_axis(self, node: onnx_ir.Node) -> BatchAxis:
        """Where the first input carries the batch; no other may."""
        first, *others = node.inputs
        if first not in self.axes or any(value in self.axes for value in others):
            raise self.error(node, "the batch comes in where weights or settings are expected")
        return self.axes[first]

    def constant(self, node: onnx_ir.Node, index: int) -> list[int] | None:
        """The integers of a constant input; None where it is left out."""
        numbers = self.numbers(node, index)
        return None if numbers is None else [int(number) for number in numbers]

    def numbers(self, node: onnx_ir.Node, index: int) -> list[float] | None:
        """The numbers of a constant input; None where it is left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return None
        if value.const_value is None:
            raise self.error(node, f"'{value.name}' is computed, expected a constant")
        found: list[float] = np.ravel(value.const_value.numpy()).tolist()
        return found

    def replace_constant(self, node: onnx_ir.Node, index: int, numbers: Sequence[int]) -> None:
        """Gives a node another constant; the old one may have other users."""
        name = f"{node.outputs[0].name}/batch/{index}"  # nodes may have no name, or all the same
        self._repairs.append(lambda: node.replace_input_with(index, self._weight(name, numbers)))

    def broadcast(self, node: onnx_ir.Node, values: Sequence[Value], rank: int) -> BatchAxis:
        """Where the result of values that broadcast carries the batch; those that must carry it, too, are repaired."""
        found: BatchAxis | None = None
        for value in values:
            if value in self.axes:
                own = self.axes[value]
                aligned = replace(own, axis=own.axis + rank - len(self.shape(value)))
                if found is not None and aligned != found:
                    raise self.error(node, f"its inputs carry the batch in different places: {found}, {aligned}")
                found = aligned
        if found is None:
            raise self.error(node, "the batch comes in where weights or settings are expected")
        for index, other in enumerate(node.inputs):
            if other in values and other not in self.axes:
                shape = self.shape(other)
                axis = found.axis - (rank - len(shape))
                if axis >= 0 and shape[axis] != 1:
                    self.carry(node, index, replace(found, axis=axis))
        return found

    def choose(self, node: onnx_ir.Node, places: Sequence[BatchAxis]) -> BatchAxis:
        """One of the places that the shapes of a node allow: the first one, until that has led nowhere."""
        if len(places) > 1:
            self.open_choices[node] = len(places)
        return places[self._choices.get(node, 0)]

    def let_repair(self, repair: Callable[[], None]) -> None:
        """Has something changed once the batch was followed to the end."""
        self._repairs.append(repair)

    def carry(self, node: onnx_ir.Node, index: int, batch: BatchAxis) -> None:
        """Lets an input carry the batch that does not: it was expanded to it, or must be now.

        Raises:
            ExpandedToBatch: It was computed from one that was expanded.
        """
        value = self.required(node, index)
        shape = self.shape(value)
        source = self._unexpanded(node, value, batch)
        self._repairs.append(lambda: self._expand_input(node, index, source, shape, batch))

    def _expand_input(
        self, node: onnx_ir.Node, index: int, source: Value, shape: Sequence[int], batch: BatchAxis
    ) -> None:
        name = f"{node.outputs[0].name}/batch/{index}"  # nodes may have no name, or all the same
        expand = onnx_ir.node("Expand", [source, self._target(node, name, shape, batch)], name=name)
        result = expand.outputs[0]
        result.name, result.shape, result.type = name, onnx_ir.Shape(shape), source.type
        name_batch(result, batch)
        self.model.graph.insert_before(node, [expand])
        node.replace_input_with(index, result)

    def _unexpanded(self, node: onnx_ir.Node, value: Value, batch: BatchAxis) -> Value:
        """A value before it was expanded to the saved batch."""
        if self.shape(value)[batch.axis] == 1:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Expand" and producer.inputs[0] is not None:
            source = producer.inputs[0]
            axis = batch.axis - len(self.shape(value)) + len(self.shape(source))
            if axis < 0 or self.shape(source)[axis] == 1:
                return source
        if (row := self._equal_row(value, batch)) is not None:
            return row
        above = self._expanded_above(value)
        if above is None:
            raise self.error(node, f"'{value.name}' has the saved batch in it, and no Expand says where from")
        raise above

    def _equal_row(self, value: Value, batch: BatchAxis) -> Value | None:
        """One row of a constant that holds the same for each sample, or None."""
        if value.const_value is None or batch.before * batch.after != 1:
            return None
        array = value.const_value.numpy()
        row = array.take([0], batch.axis)
        if not np.array_equal(np.broadcast_to(row, array.shape), array):
            return None
        name = f"{value.name}/row"
        if name in self.model.graph.initializers:
            return self.model.graph.initializers[name]
        made = Value(
            name=name,
            shape=onnx_ir.Shape(row.shape),
            type=value.type,
            const_value=onnx_ir.Tensor(row, dtype=value.dtype, name=name),
        )
        self.model.graph.register_initializer(made)
        return made

    def _expanded_above(self, value: Value) -> ExpandedToBatch | None:
        """The nearest Expand to the saved batch that a value is computed from."""
        waiting = [value]
        for computed in waiting:
            producer = computed.producer()
            if producer is None:
                continue
            if producer.op_type == "Expand" and computed not in self.expanded:
                shape = self.shape(computed)
                before = (1,) * len(shape) + self.shape(producer.inputs[0])
                for axis, (old, new) in enumerate(zip(before[-len(shape) :], shape, strict=True)):
                    if old == 1 and new == self.batch:
                        return ExpandedToBatch(computed, BatchAxis(axis))
            waiting += [source for source in producer.inputs if source is not None and source not in waiting]
        return None

    def _target(self, node: onnx_ir.Node, name: str, shape: Sequence[int], batch: BatchAxis) -> Value:
        """A shape with the batch of each request in it, `[rank]`."""
        size, factor = self._batch_size(), batch.before * batch.after
        if factor != 1:
            times = onnx_ir.node("Mul", [size, self._weight(f"{name}/factor", [factor])], name=f"{name}/size")
            self.model.graph.insert_before(node, [times])
            size = times.outputs[0]
        parts = [self._weight(f"{name}/dim{axis}", [dim]) for axis, dim in enumerate(shape)]
        parts[batch.axis] = size
        joined = onnx_ir.node("Concat", parts, {"axis": 0}, name=f"{name}/shape")
        self.model.graph.insert_before(node, [joined])
        return joined.outputs[0]

    def _batch_size(self) -> Value:
        """The batch of a request, `[1]`."""
        if self._counted is None:
            node = onnx_ir.node("Shape", [self.model.graph.inputs[0]], {"start": 0, "end": 1}, name="batch/size")
            self.model.graph.insert_before(self.model.graph[0], [node])
            self._counted = node.outputs[0]
        return self._counted

    def _weight(self, name: str, numbers: Sequence[int]) -> Value:
        """A new constant of the graph, INT64 `[len(numbers)]`."""
        tensor = onnx_ir.tensor(np.asarray(numbers, np.int64), name=name)
        value = Value(
            name=name, shape=onnx_ir.Shape([len(numbers)]), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.model.graph.register_initializer(value)
        return value


def _inner_nodes(attribute: onnx_ir.Attr) -> Iterator[onnx_ir.Node]:
    """The nodes of a graph that is an attribute, such as a branch of an If."""
    if attribute.type == onnx_ir.AttributeType.GRAPH:
        yield from attribute.as_graph().all_nodes()


# Where products, recurrent layers and quantized operators leave the batch.
#
# Source: ONNX operator schemas, version 18.

# Inputs of a recurrent layer that have a batch; the others are weights.
_SEQUENCE_LENGTHS, _FIRST_STATE, _LAST_STATE = 4, 5, 6


def gemm(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """`A B + C`, the batch in the rows of A."""
    a, b = follower.required(node, 0), follower.required(node, 1)
    rows = 1 if follower.integer(node, "transA") else 0
    if b in follower.axes or a not in follower.axes or follower.axes[a].axis != rows:
        raise follower.error(node, "the batch is not in the rows of the first factor")
    result = replace(follower.axes[a], axis=0)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return result
    shape = follower.shape(bias)
    if bias in follower.axes:
        if follower.axes[bias] != result or len(shape) != 2:
            raise follower.error(node, "its inputs carry the batch in different places")
    elif len(shape) == 2 and shape[0] != 1:
        follower.carry(node, 2, result)
    return result


def einsum(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """The batch has one letter, which is not summed over."""
    terms, _, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    operands = terms.split(",")
    if not result or "." in terms:
        raise follower.error(node, "its equation does not name every axis")
    carried = {
        (operand[follower.axes[value].axis], replace(follower.axes[value], axis=0))
        for operand, value in zip(operands, node.inputs, strict=True)
        if value in follower.axes
    }
    ((letter, batch),) = carried if len(carried) == 1 else {("", BatchAxis(0))}
    if not letter or letter not in result:
        raise follower.error(node, "it sums over the batch, or its inputs carry it under different letters")
    for index, (operand, value) in enumerate(zip(operands, node.inputs, strict=True)):
        if value not in follower.axes and letter in operand:
            follower.carry(node, index, replace(batch, axis=operand.index(letter)))
    return replace(batch, axis=result.index(letter))


def recurrent(follower: Follower, node: onnx_ir.Node) -> tuple[BatchAxis, ...]:
    """LSTM, GRU and RNN: `[time, batch, features]`, or the batch first with `layout: 1`."""
    first = follower.integer(node, "layout") == 1
    batch = BatchAxis(0 if first else 1)
    if follower.axes.get(follower.required(node, 0)) != batch:
        raise follower.error(node, f"the batch of its input is not axis {batch.axis}: it would be taken for the time")
    for index, value in enumerate(node.inputs):
        if value is None or index == 0:
            continue
        place = {_SEQUENCE_LENGTHS: BatchAxis(0), _FIRST_STATE: batch, _LAST_STATE: batch}.get(index)
        if place is None or (index == _LAST_STATE and node.op_type != "LSTM"):
            if value in follower.axes:
                raise follower.error(node, "the batch comes in where weights are expected")
        elif value not in follower.axes:
            follower.carry(node, index, place)
        elif follower.axes[value] != place:
            raise follower.error(node, f"the batch of '{value.name}' is not axis {place.axis}")
    return (BatchAxis(0 if first else 2), batch, batch)


def batch_norm(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """With saved statistics: in training mode they are those of the batch."""
    mode = follower.attribute(node, "training_mode")  # none before opset 14
    if mode is not None and mode.as_int():
        raise follower.error(node, "in training mode it normalizes by the statistics of the batch")
    batch = follower.data_axis(node)
    if batch.axis != 0:
        raise follower.error(node, f"the batch is axis {batch.axis}, expected 0")
    return batch


def dropout(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Of inference: it copies."""
    if len(node.inputs) > 2 and follower.constant(node, 2) != [0]:
        raise follower.error(node, "in training mode it is random")
    return follower.data_axis(node)


def mean_variance(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """MeanVarianceNormalization, which by default takes all samples together."""
    batch = follower.data_axis(node)
    axes = follower.attribute(node, "axes")
    rank = len(follower.shape(node.inputs[0]))
    if axes is None or batch.axis in [axis % rank for axis in axes.as_ints()]:
        raise follower.error(node, "it normalizes by the statistics of the batch")
    return batch


def quantize(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """With a scale for all, or one along another axis."""
    batch = follower.data_axis(node)
    axis = follower.integer(node, "axis") % max(1, len(follower.shape(node.inputs[0])))
    if follower.shape(node.inputs[1]) not in ((), (1,)) and axis == batch.axis:
        raise follower.error(node, "each sample has a scale of its own")
    return batch


def quantized_product(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """QLinearMatMul and MatMulInteger: the batch in the first factor, not in its last axis."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    weights = node.inputs[3 if node.op_type == "QLinearMatMul" else 1]
    if batch.axis == len(shape) - 1 or len(follower.shape(weights)) > 2:
        raise follower.error(node, "the batch is not in the rows of the first factor")
    return batch


# Where operators that rearrange values leave the batch.
#
# Source: ONNX operator schemas, version 18.

_END = (1 << 63) - 1  # the end of a slice that takes all there is


def flatten(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """`[first axes, last axes]`."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    at = follower.integer(node, "axis")
    at += len(shape) if at < 0 else 0
    start, stop, axis = (0, at, 0) if batch.axis < at else (at, len(shape), 1)
    before, after = math.prod(shape[start : batch.axis]), math.prod(shape[batch.axis + 1 : stop])
    return BatchAxis(axis, before * batch.before, batch.after * after)


def squeeze(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Without axes it would take away a batch of 1, too: they are named."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    given = follower.constant(node, 1)
    axes = [axis % len(shape) for axis in given] if given is not None else _ones(shape, batch)
    if batch.axis in axes:
        raise follower.error(node, "it takes the batch away")
    if given is None:
        node.resize_inputs(2)
        follower.replace_constant(node, 1, axes)
    return replace(batch, axis=batch.axis - sum(axis < batch.axis for axis in axes))


def _ones(shape: tuple[int, ...], batch: BatchAxis) -> list[int]:
    return [axis for axis, size in enumerate(shape) if size == 1 and axis != batch.axis]


def split(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along another axis than the batch; into one part along any."""
    batch = follower.data_axis(node)
    if follower.integer(node, "axis") % len(follower.shape(node.inputs[0])) == batch.axis:
        raise follower.error(node, "it splits the batch")
    return batch


def slice_(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along other axes; or along the batch where it takes all of it."""
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    starts, ends = follower.constant(node, 1) or [], follower.constant(node, 2) or []
    axes = follower.constant(node, 3)
    steps = follower.constant(node, 4) or [1] * len(starts)
    places = [axis % rank for axis in (range(len(starts)) if axes is None else axes)]
    if batch.axis not in places:
        return batch
    at = places.index(batch.axis)
    size = follower.shape(node.inputs[0])[batch.axis]
    if (starts[at], steps[at]) != (0, 1) or ends[at] < size:
        raise follower.error(node, "it takes some samples of the batch")
    follower.replace_constant(node, 2, [_END if place == at else end for place, end in enumerate(ends)])
    return batch


def tile(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Repeats other axes."""
    batch = follower.data_axis(node)
    if (follower.constant(node, 1) or [])[batch.axis] != 1:
        raise follower.error(node, "it repeats the batch")
    return batch


def resize(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along other axes; sizes that name the batch, too, are reduced to the others."""
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    axes = list(node.attributes["axes"].as_ints()) if "axes" in node.attributes else list(range(rank))
    places = [axis % rank for axis in axes]
    if batch.axis not in places:
        return batch
    index = 3 if follower.constant(node, 3) else 2
    numbers = follower.numbers(node, index)
    at = places.index(batch.axis)
    same = follower.shape(node.inputs[0])[batch.axis] if index == 3 else 1
    if numbers is None or numbers[at] != same:
        raise follower.error(node, "it resizes the batch")
    if index == 3:
        others = [place for place in places if place != batch.axis]
        follower.replace_constant(node, 3, [int(numbers[places.index(place)]) for place in others])
        follower.let_repair(lambda: node.attributes.add(onnx_ir.AttrInt64s("axes", others)))
    return batch


def gather_all(follower: Follower, node: onnx_ir.Node) -> bool:
    """Whether a Gather or GatherND picks every sample of the batch in order, as a copy does for a batch of any size."""
    data, indices = follower.required(node, 0), follower.required(node, 1)
    nd = node.op_type == "GatherND"
    axis = follower.integer(node, "batch_dims" if nd else "axis") % len(follower.shape(data))
    if follower.axes.get(data) != BatchAxis(axis):
        return False
    if follower.shape(indices) != ((follower.batch, 1) if nd else (follower.batch,)):
        return False
    if follower.constant(node, 1) != list(range(follower.batch)):
        return False
    follower.let_repair(lambda: _become_identity(node))
    return True


def _become_identity(node: onnx_ir.Node) -> None:
    node.op_type = "Identity"
    node.resize_inputs(1)
    node.attributes.clear()


def triangle(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along the last two axes."""
    batch = follower.data_axis(node)
    if batch.axis >= len(follower.shape(node.inputs[0])) - 2:
        raise follower.error(node, "it works along the batch")
    return batch


# Where the outputs carry the batch: all in one place, or each in its own.
Rule = Callable[[Follower, onnx_ir.Node], BatchAxis | tuple[BatchAxis, ...]]


def _elementwise(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    values = [value for value in node.inputs if value is not None]
    return follower.broadcast(node, values, max(len(follower.shape(value)) for value in values))


def _by_sample(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Convolutions, pooling and the like: the batch comes first."""
    batch = follower.data_axis(node)
    if batch.axis != 0:
        raise follower.error(node, f"the batch is axis {batch.axis}, expected 0")
    return batch


def _reshape(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    source, target = follower.shape(node.inputs[0]), follower.shape(node.outputs[0])
    if not math.prod(source):
        raise follower.error(node, "what it reshapes is empty")
    ahead = math.prod(source[: batch.axis]) * batch.before
    places = []
    passed = 1
    for axis, size in enumerate(target):
        if ahead % passed == 0 and size % (ahead // passed * follower.batch) == 0:
            before = ahead // passed
            places.append(BatchAxis(axis, before, size // (before * follower.batch)))
        passed *= size
    if not places:
        raise follower.error(node, f"{list(source)} -> {list(target)} tears the batch apart")
    # Where the batch was 1, more than one axis can have it: that of size 1 before those that hold more.
    place = follower.choose(node, sorted(places, key=lambda place: place.before * place.after != 1))
    follower.replace_constant(node, 1, [-1 if axis == place.axis else size for axis, size in enumerate(target)])
    return place


def _transpose(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
    return replace(batch, axis=perm.index(batch.axis))


def _expand(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    target = list(follower.shape(node.outputs[0]))
    axis = batch.axis + len(target) - len(follower.shape(node.inputs[0]))
    target[axis] = 1  # as the input has it
    follower.replace_constant(node, 1, target)
    return replace(batch, axis=axis)


def _together(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """All inputs carry the batch in the same place, without broadcasting."""
    (first, *others) = {follower.axes[value] for value in node.inputs if value in follower.axes}
    if others:
        raise follower.error(node, f"its inputs carry the batch in different places: {first}, {others[0]}")
    for index, value in enumerate(node.inputs):
        if value not in follower.axes:
            follower.carry(node, index, first)
    return first


def _along_together(why: str) -> Rule:
    """A rule for nodes that take all inputs together along their axis."""

    def rule(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
        batch = _together(follower, node)
        if batch.axis == follower.integer(node, "axis") % len(follower.shape(node.outputs[0])):
            raise follower.error(node, why)
        return batch

    return rule


def _unsqueeze(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.outputs[0]))
    new = {axis % rank for axis in follower.constant(node, 1) or ()}
    return replace(batch, axis=[axis for axis in range(rank) if axis not in new][batch.axis])


def _matmul(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    a, b = follower.required(node, 0), follower.required(node, 1)
    ranks = len(follower.shape(a)), len(follower.shape(b))
    rank = max(*ranks, 2)
    if min(ranks) < 2:
        raise follower.error(node, "a vector has no batch")
    for value, contracted in ((a, ranks[0] - 1), (b, ranks[1] - 2)):
        if value in follower.axes and follower.axes[value].axis == contracted:
            raise follower.error(node, "it sums over the batch")
    for value, own in ((a, ranks[0] - 2), (b, ranks[1] - 1)):
        if value in follower.axes and follower.axes[value].axis == own:
            if (b if value is a else a) in follower.axes:
                raise follower.error(node, "both factors carry the batch, one of them in its rows or columns")
            return replace(follower.axes[value], axis=rank - 2 if value is a else rank - 1)
    return follower.broadcast(node, [a, b], rank)


def _along(axis_of: Callable[[Follower, onnx_ir.Node], list[int]]) -> Rule:
    """A rule for nodes that work along some axes and keep the rank."""

    def rule(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
        batch = follower.data_axis(node)
        rank = len(follower.shape(node.inputs[0]))
        if batch.axis in [axis % rank for axis in axis_of(follower, node)]:
            raise follower.error(node, "it works along the batch")
        return batch

    return rule


def _attribute_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    return [follower.integer(node, "axis")]


def _from_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    rank = len(follower.shape(node.inputs[0]))
    return list(range(follower.integer(node, "axis") % rank, rank))


def _input_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    return follower.constant(node, 1) or []


def _padded_axes(follower: Follower, node: onnx_ir.Node) -> list[int]:
    widths = follower.constant(node, 1) or []
    count = len(widths) // 2
    axes = follower.constant(node, 3) or list(range(count))
    return [axis for at, axis in enumerate(axes) if widths[at] or widths[at + count]]


def _reduction(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    single = follower.attribute(node, "axis")
    given = follower.constant(node, 1) if single is None else [single.as_int()]
    axes = {axis % rank for axis in (given or range(rank))}
    if batch.axis in axes:
        raise follower.error(node, "it takes the samples of the batch together")
    if follower.integer(node, "keepdims"):
        return batch
    return replace(batch, axis=batch.axis - sum(axis < batch.axis for axis in axes))


def _gather(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    data, indices = follower.required(node, 0), follower.required(node, 1)
    rank, axis = len(follower.shape(data)), follower.integer(node, "axis")
    axis %= rank
    if data in follower.axes and indices in follower.axes:
        raise follower.error(node, "data and indices both carry the batch")
    if indices in follower.axes:
        own = follower.axes[indices]
        return replace(own, axis=own.axis + axis)
    own = follower.axes[data]
    if own.axis == axis:
        if gather_all(follower, node):
            return own
        raise follower.error(node, "it picks samples of the batch")
    return own if own.axis < axis else replace(own, axis=own.axis + len(follower.shape(indices)) - 1)


def _one_hot(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    new = follower.integer(node, "axis") % len(follower.shape(node.outputs[0]))
    return replace(batch, axis=batch.axis + (new <= batch.axis))


def _gather_nd(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    data, indices = follower.required(node, 0), follower.required(node, 1)
    index_shape = follower.shape(indices)
    if data in follower.axes and indices in follower.axes:
        raise follower.error(node, "data and indices both carry the batch")
    if indices in follower.axes:
        return follower.axes[indices]
    own = follower.axes[data]
    if own.axis < index_shape[-1]:
        if gather_all(follower, node):
            return own
        raise follower.error(node, "it picks samples of the batch")
    return replace(own, axis=own.axis - index_shape[-1] + len(index_shape) - 1)


_ELEMENTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu "
    "Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN "
    "LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor"
)
_BY_SAMPLE = (
    "AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv SpaceToDepth"
)
_REDUCTIONS = (
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
# Operator -> its rule.
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_BY_SAMPLE.split(), _by_sample),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), quantize),
    **dict.fromkeys(("MatMulInteger", "QLinearMatMul"), quantized_product),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK"), _along(_attribute_axis)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _along(_from_axis)),
    "BatchNormalization": batch_norm,
    "Concat": _along_together("it joins samples of the batch"),
    "CumSum": _along(_input_axis),
    "Dropout": dropout,
    "Einsum": einsum,
    "Expand": _expand,
    "Flatten": flatten,
    "Gather": _gather,
    "GatherElements": _along_together("it picks samples of the batch"),
    "GatherND": _gather_nd,
    "Gemm": gemm,
    "GridSample": _together,
    "MatMul": _matmul,
    "MeanVarianceNormalization": mean_variance,
    "OneHot": _one_hot,
    "Pad": _along(_padded_axes),
    "Reshape": _reshape,
    "Resize": resize,
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": _transpose,
    "Trilu": triangle,
    "Unsqueeze": _unsqueeze,
}
