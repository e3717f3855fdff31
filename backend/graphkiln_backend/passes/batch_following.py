"""Follows the batch through a graph of fixed shapes, and repairs where its size is baked in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH

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
